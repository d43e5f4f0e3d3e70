"""The DecodeRouter actor: one a deployment, detached and named, a thin shell around RouterState."""

from __future__ import annotations

import asyncio
import logging
import pickle
import time
from collections import Counter as Counts
from typing import Any

import ray
from numpy.typing import NDArray
from ray.actor import ActorHandle
from ray.util.metrics import Counter, Gauge, Histogram

from eldr_serve.channel import Answer, ChannelServer
from eldr_serve.errors import SwapRefused, sentence
from eldr_serve.routing import Placement, State, StepSums
from eldr_serve.serving.address import Address, open_channel
from eldr_serve.serving.messages import Exchange, NamedPolicy, Reply, Restore, Restored, Settings
from eldr_serve.serving.router_settings import RouterSettings
from eldr_serve.serving.router_state import RouterState
from eldr_serve.serving.shared_limits import SharedLimits
from eldr_serve.serving.tenants import Taken

logger = logging.getLogger(__name__)

NAMESPACE = "eldr"
_IDLE_EXIT_S = 600.0  # without a word from any ingress, before the actor leaves
_REAP_PERIOD_S = 1.0
_SHADOW_WORK_S, _SHADOW_PAUSE_S, _SHADOW_PERIOD_S = 0.002, 0.004, 0.05


class DecodeRouter:
    """Holds live load, leases, the policy and the table for every ingress of one deployment."""

    def __init__(self, settings: RouterSettings) -> None:
        self._start(settings)
        self._limits = SharedLimits()
        self._channel: asyncio.Future[tuple[Address, ChannelServer]] | None = None
        loop = asyncio.get_event_loop()
        self._tasks = [loop.create_task(run()) for run in (self._reap, self._compare)]

    async def address(self) -> Address:
        """Where clients call all methods but this one (see RouterCalls)."""
        if self._channel is None:
            self._channel = asyncio.ensure_future(open_channel(self._answer, describe=_describe))
        return (await self._channel)[0]

    async def _answer(self, method: str, header: dict[str, Any], body: bytes, answer: Answer) -> None:
        result = await getattr(self, method)(*pickle.loads(body))
        answer.send(pickle.dumps(result, protocol=5))

    def _start(self, settings: RouterSettings, older: Settings | None = None) -> None:
        self._state = RouterState(**dict(settings))
        self._state.supersede(settings.fingerprint, older)
        self._last_call = time.monotonic()
        self._metrics = _Metrics()

    async def configure(self, settings: RouterSettings) -> None:
        """Start anew if the deployment was changed: it wins over what operators said before it, which
        clients would restore. Leases come back from the clients."""
        outbox, older = self._state.outbox, self._state.settings
        if settings.fingerprint != older.deployed:
            self._start(settings, older)
            outbox.close()
            logger.warning(
                "the deployed router settings have changed: policy %s %s and %s win over %s %s and table %d",
                settings.policy,
                settings.parameters,
                "no table" if settings.table is None else "the table of the deployment",
                older.policy,
                older.parameters,
                older.table_version,
            )

    async def exchange(self, message: Exchange) -> Reply:
        """Take a client's news and place its requests; see RouterState.exchange."""
        self._last_call = time.monotonic()
        start = time.perf_counter()
        reply = self._state.exchange(message)
        if message.placements and reply.refused is None:
            self._metrics.placed(self._state, reply, time.perf_counter() - start)
        return reply

    async def granted(self, client: str, timeout_s: float) -> tuple[Placement, ...]:
        """Leases for requests of the client out of the decode queue; waits up to `timeout_s` for one."""
        self._last_call = time.monotonic()
        leases = await self._state.outbox.take(client, timeout_s)
        self._metrics.granted(self._state, leases)
        return leases

    async def restore(self, message: Restore) -> Restored:
        """Take from a client what an earlier incarnation knew."""
        self._last_call = time.monotonic()
        return self._state.restore(message)

    async def settings(self) -> Settings:
        """The live policy and table."""
        return self._state.settings

    async def update_workers(self, replicas: tuple[str, ...]) -> None:
        """Take the ids of the live decode replicas."""
        self._state.update_workers(replicas)

    async def expect_signatures(self, num_layers: int, num_experts: int) -> None:
        """Take the signature shape that engines report."""
        self._state.expect_signatures(num_layers, num_experts)

    async def observe_steps(
        self, steps: StepSums, replica: str = "", prefix_cache: tuple[int, int] = (0, 0)
    ) -> None:
        """Take what the steps of a decode replica's engine cost of late, and how much its cache holds."""
        self._state.observe_steps(steps, replica, prefix_cache)

    async def set_policy(self, policy: str, parameters: dict[str, Any]) -> Settings:
        """Raises SwapRefused with one sentence, and changes nothing, if the policy is unknown."""
        return self._state.set_policy(policy, parameters)

    async def set_shadow(self, shadow: NamedPolicy | None) -> Settings:
        """Raises SwapRefused with one sentence, and changes nothing, if the policy is unknown."""
        return self._state.set_shadow(shadow)

    async def swap_table(self, table: bytes) -> Settings:
        """Raises SwapRefused with one sentence, and changes nothing, if the table does not fit."""
        return self._state.swap_table(table)

    async def swap_predictor(self, predictor: bytes, tokenizer: str) -> Settings:
        """Raises SwapRefused with one sentence, and changes nothing, if the predictor does not fit."""
        return self._state.swap_predictor(predictor, tokenizer)

    async def share_limits(self, ingress: str, taken: Taken) -> dict[str, Taken]:
        """Take what tenants have taken of their limits at an ingress; the same of each other one."""
        return self._limits.exchange(ingress, taken)

    async def recent_signatures(self) -> list[NDArray[Any]]:
        """Unsigned[L,E] expert counts of prompts that were placed lately, the newest last."""
        return list(self._state.recent)

    async def status(self) -> dict[str, Any]:
        """What `GET /eldr/status` shows."""
        return self._state.status()

    async def live(self) -> dict[str, Any]:
        """What `GET /eldr/live` shows."""
        return self._state.live()

    async def _compare(self) -> None:
        """The shadow works a little at a time, and placements go between."""
        while True:
            behind = self._state.comparison.catch_up(_SHADOW_WORK_S)
            await asyncio.sleep(_SHADOW_PAUSE_S if behind else _SHADOW_PERIOD_S)

    async def _reap(self) -> None:
        while True:
            await asyncio.sleep(_REAP_PERIOD_S)
            self._state.drop_silent_clients()
            self._metrics.load(self._state)
            if time.monotonic() - self._last_call > _IDLE_EXIT_S:
                ray.actor.exit_actor()


def _describe(error: Exception) -> tuple[int, bytes]:
    if isinstance(error, SwapRefused):
        return 400, str(error).encode()
    logger.error("a call failed", exc_info=error)
    return 500, sentence(error).encode()


class _Metrics:
    """Prometheus metrics by ray.util.metrics, labelled by worker and policy."""

    def __init__(self) -> None:
        by_worker = ("worker", "policy")
        self._route = Histogram(
            "eldr_route_seconds",
            description="time to place one batch of requests in the router, s",
            boundaries=[1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1],
            tag_keys=("policy",),
        )
        self._band = Histogram(
            "eldr_band_size",
            description="workers that the policy chose among",
            boundaries=[1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024],
            tag_keys=("policy",),
        )
        self._in_flight = Gauge("eldr_decode_in_flight", "requests leased to the worker", by_worker)
        self._kv_tokens = Gauge("eldr_decode_kv_tokens", "KV tokens of those requests", by_worker)
        self._table = Gauge("eldr_table_version", "version of the live table, 0 if none", ("policy",))
        self._missing = Counter(
            "eldr_signature_missing_total", "requests placed without signature", ("policy",)
        )
        self._predicted = Counter(
            "eldr_signature_predicted_total", "requests placed by a predicted signature", ("policy",)
        )
        self._accuracy = {
            "gain": Gauge("eldr_predictor_gain", "1 - squared error of predictions / that of the mean"),
            "cosine": Gauge("eldr_predictor_cosine", "of predicted and true deviations from the mean"),
            "on": Gauge("eldr_predictor_on", "ingress replicas whose predictor is better than the mean"),
        }
        self._queue_size = Gauge(
            "eldr_decode_queue_size", "prefilled requests that wait for a worker", ("policy",)
        )
        self._queue_wait = Histogram(
            "eldr_decode_queue_wait_seconds",
            description="time that a request waited in the decode queue before it was given a worker, s",
            boundaries=[0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30],
            tag_keys=("policy",),
        )
        self._reroute = Counter("eldr_reroute_total", "requests placed again after a failure", ("policy",))
        self._failures = Counter(
            "eldr_predictor_failures_total", "predictions that could not be used", ("policy",)
        )
        self._seen: Counts[str] = Counts()

    def placed(self, state: RouterState, reply: Reply, seconds: float) -> None:
        tags = {"policy": state.settings.policy}
        self._route.observe(seconds, tags)
        for placement in reply.placements:
            if placement.state is State.LEASED:
                self._band.observe(placement.band, tags)
        self._count("signature_missing", state.counters["signature_missing"], self._missing, tags)
        self._count("signature_predicted", state.counters["signature_predicted"], self._predicted, tags)
        self._count("rerouted", state.counters["rerouted"], self._reroute, tags)

    def _count(self, name: str, total: int, counter: Counter, tags: dict[str, str]) -> None:
        if total > self._seen[name]:
            counter.inc(total - self._seen[name], tags)
            self._seen[name] = total

    def granted(self, state: RouterState, leases: tuple[Placement, ...]) -> None:
        tags = {"policy": state.settings.policy}
        for lease in leases:
            self._band.observe(lease.band, tags)
            self._queue_wait.observe(lease.waited_s, tags)

    def load(self, state: RouterState) -> None:
        policy = state.settings.policy
        self._queue_size.set(state.queue_size, {"policy": policy})
        self._table.set(state.settings.table_version, {"policy": policy})
        self._count("predictor_failures", state.predictor_failures, self._failures, {"policy": policy})
        for name, value in (state.prediction or {}).items():
            if name in self._accuracy:
                self._accuracy[name].set(value)
        for worker in state.status()["workers"]:
            tags = {"worker": worker["replica"], "policy": policy}
            self._in_flight.set(worker["in_flight"], tags)
            self._kv_tokens.set(worker["kv_tokens"], tags)


def actor_name(application: str) -> str:
    """The name under which the DecodeRouter of a deployment is found, in namespace `eldr`."""
    return f"decode-router:{application}"


def connect(name: str, settings: RouterSettings) -> ActorHandle:
    """The named actor, started if it is not there."""
    handle: ActorHandle = (
        ray.remote(DecodeRouter)
        .options(
            name=name,
            namespace=NAMESPACE,
            lifetime="detached",
            get_if_exists=True,
            max_restarts=-1,
            max_concurrency=1000,
            num_cpus=0,
        )
        .remote(settings)
    )
    return handle


def find(name: str) -> ActorHandle:
    """The named actor; ValueError if no deployment of that name runs."""
    return ray.get_actor(name, namespace=NAMESPACE)
