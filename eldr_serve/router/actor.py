"""The detached, named DecodeRouter actor of a deployment: a thin shell around RouterState."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any

import ray
from numpy.typing import NDArray
from ray.actor import ActorHandle

from eldr_serve.actors import start_actor
from eldr_serve.channel import ChannelServer, Reply
from eldr_serve.channel.address import Address, start_channel_server
from eldr_serve.engine.experts_change import ExpertPlacementOfPosition
from eldr_serve.errors import SwapRefusedError, one_line_message
from eldr_serve.limits.tenants import SharedLimits, Usage
from eldr_serve.monitoring.loop_watch import LoopWatch
from eldr_serve.monitoring.ray_metrics import PERIOD_S
from eldr_serve.monitoring.supervision import start_supervised
from eldr_serve.router.expert_placements import expert_placement_of
from eldr_serve.router.ingress_calls import IngressCalls
from eldr_serve.router.metrics_export import RouterMetrics
from eldr_serve.router.pool_link import PoolLink
from eldr_serve.router.settings import RouterSettings
from eldr_serve.router.state import RouterState
from eldr_serve.router.status import live_status, router_status
from eldr_serve.router_protocol import methods
from eldr_serve.router_protocol.messages import LiveSettings, NamedPolicy
from eldr_serve.scheduling.adapters import LoadedAdapters
from eldr_serve.scheduling.cost import StepAnswer, StepSums
from eldr_serve.scheduling.decode_loads import DecodeLoads
from eldr_serve.scheduling.prefixes import BlockChanges, PrefixCacheSize, PromptBlocks
from eldr_serve.signatures.coordinator import RouterView

logger = logging.getLogger(__name__)

_IDLE_EXIT_S = 600.0  # time without a connected ingress after which the actor exits
_SHADOW_WORK_S, _SHADOW_PAUSE_S, _SHADOW_PERIOD_S = 0.002, 0.004, 0.05


class DecodeRouter:
    """Live load, leases, the policy and the table of one deployment, shared by its ingresses."""

    def __init__(self, settings: RouterSettings) -> None:
        self._pool = PoolLink()
        self._metrics = RouterMetrics()
        self._state = _new_state(settings)
        self._state_fingerprint = settings.fingerprint  # fingerprint of the settings that built the state
        self._expert_placements = settings.expert_placements
        self._pool.apply_settings(settings.pool)
        self._ingress_calls = IngressCalls(self._state, self._metrics, settings.ingress_timeout_s)
        self._connected_at_s = time.monotonic()
        self._limits = SharedLimits()
        self._watch = LoopWatch("router")
        self._channel_server: asyncio.Future[tuple[Address, ChannelServer]] | None = None
        self._methods = self._bind_methods()
        self._tasks = [
            start_supervised(name, run)
            for name, run in {
                "the export of metrics": self._export,
                "the exit of an idle router": self._exit_when_idle,
                "the shadow policy": self._run_shadow,
                "the event-loop monitor": self._watch.run,
            }.items()
        ]

    async def address(self) -> Address:
        """Return the address of the channel server for ingresses (see RouterCalls)."""
        if self._channel_server is None or (
            self._channel_server.done() and self._channel_server.exception() is not None
        ):
            self._channel_server = asyncio.ensure_future(self._open())
        return (await asyncio.shield(self._channel_server))[0]

    async def _open(self) -> tuple[Address, ChannelServer]:
        return await start_channel_server(
            self._handle_call, error_response=_error_response, open_methods=self._ingress_calls.open_methods
        )

    async def _handle_call(self, method: str, header: dict[str, Any], body: bytes, reply: Reply) -> None:
        if method not in self._methods:
            raise AttributeError(f"the router has no method {method!r}")
        reply.send(await self._methods[method](body))

    def _bind_methods(self) -> dict[str, Callable[[bytes], Awaitable[bytes]]]:
        """Return the methods that ingresses may call, by name."""
        return dict(
            [
                methods.SETTINGS.bind(lambda call: self.settings()),
                methods.STATUS.bind(lambda call: self.status()),
                methods.LIVE.bind(lambda call: self.live()),
                methods.EXPECT_COUNTS.bind(
                    lambda call: self.expect_counts(call.num_layers, call.num_experts)
                ),
                methods.SET_POLICY.bind(lambda call: self.set_policy(call.policy, call.parameters)),
                methods.SET_SHADOW.bind(lambda call: self.set_shadow(call.shadow)),
                methods.SWAP_TABLE.bind(lambda call: self.swap_table(call.table)),
                methods.SWAP_PREDICTOR.bind(lambda call: self.swap_predictor(call.predictor, call.tokenizer)),
                methods.SHARE_LIMITS.bind(lambda call: self.share_limits(call.ingress, call.usage)),
                methods.DECODE_LOADS.bind(lambda call: self.decode_loads(call.blocks)),
            ]
        )

    async def configure(self, settings: RouterSettings, live: LiveSettings | None = None) -> None:
        """Apply the deployed settings of an ingress, which sends them to each process of this actor.

        Ray restarts the actor with the settings of the first deployment. If the state was built with other
        settings, a new state begins, in which ingresses restore their leases. New deployed settings replace
        the settings of operators, which ingresses would otherwise restore.

        Args:
            live: newest live settings that the ingress knows. If they are based on other deployed settings, a
                later deployment has replaced the ingress's settings, so nothing is changed. None: the ingress
                has just started, so its deployed settings are the newest.

        Raises:
            SwapRefusedError: the settings are invalid; nothing was changed.
        """
        previous = self._state.settings
        newest = live if live is not None and live.version > previous.version else previous
        is_new = settings.fingerprint != newest.deployed_fingerprint
        if is_new and live is not None:
            return
        state = self._state
        if is_new:
            state = _new_state(settings, newest)
        elif settings.fingerprint != self._state_fingerprint:
            state = _new_state(settings)
            state.live_settings.restore(newest)
        elif live is None and previous.version == 0:  # now older deployments do not replace this one
            state.live_settings.set_deployed_fingerprint(settings.fingerprint, overrides=previous)
        self._pool.apply_settings(settings.pool)
        state.set_patience(settings.patience_s)
        self._expert_placements = settings.expert_placements
        if state is not self._state:
            self._state, self._state_fingerprint = state, settings.fingerprint
            self._ingress_calls.replace_state(self._state, settings.ingress_timeout_s)
        if is_new:
            logger.warning(
                "the deployed router settings have changed: policy %s %s and %s replace %s %s and table %d",
                settings.policy,
                settings.parameters,
                "no table" if settings.table is None else "the table of the deployment",
                previous.policy,
                previous.parameters,
                previous.table_version,
            )

    async def settings(self) -> LiveSettings:
        """Return the live policy and table."""
        return self._state.settings

    async def expect_counts(self, num_layers: int, num_experts: int) -> None:
        """Set the shape [L, E] of the expert counts that engines report."""
        self._state.expect_counts(num_layers, num_experts)

    async def observe_steps(
        self,
        steps: dict[str, StepSums],
        prefix_cache: PrefixCacheSize | None = None,
        prefix_changes: BlockChanges | None = None,
        number: int | None = None,
    ) -> StepAnswer:
        """Record recent step costs of a replica's workers, and size and changes of their prefix caches.

        Args:
            steps: recent steps of each worker, by name.
            number: number of the replica's report; see RouterState.observe_steps.
        """
        state = self._state
        has_all_blocks = [
            state.observe_steps(sums, worker, prefix_cache, prefix_changes, number)
            for worker, sums in steps.items()
        ]
        queued = len(steps) * state.leases.queue_size / max(1, state.positions.num_live)
        return StepAnswer(queued, all(has_all_blocks))

    async def expert_placement_of_position(
        self, replica: str, digest: str
    ) -> ExpertPlacementOfPosition | None:
        """Return the expert placement of a decode replica's position; see `expert_placement_of`."""
        return expert_placement_of(self._expert_placements, self._state.positions.workers, replica, digest)

    async def set_policy(self, policy: str, parameters: dict[str, Any]) -> LiveSettings:
        """Set the policy; change nothing and raise SwapRefusedError if it is unknown."""
        return self._state.live_settings.set_policy(policy, parameters)

    async def set_shadow(self, shadow: NamedPolicy | None) -> LiveSettings:
        """Set the shadow; change nothing and raise SwapRefusedError if it is unknown."""
        return self._state.live_settings.set_shadow(shadow)

    async def swap_table(self, table: bytes) -> LiveSettings:
        """Swap the table; change nothing and raise SwapRefusedError if it does not fit."""
        return self._state.live_settings.swap_table(table)

    async def swap_predictor(self, predictor: bytes, tokenizer: str) -> LiveSettings:
        """Swap the predictor; change nothing and raise SwapRefusedError if it does not fit."""
        return self._state.live_settings.swap_predictor(predictor, tokenizer)

    async def share_limits(self, ingress: str, usage: Usage) -> dict[str, Usage]:
        """Record the usage of tenants at an ingress; return their usage at each other ingress."""
        return self._limits.exchange(ingress, usage)

    async def decode_loads(self, blocks: PromptBlocks | None) -> DecodeLoads:
        """Return the loads of all workers, to predict the latency of a request with these blocks."""
        return self._state.decode_loads(blocks)

    async def recent_counts(self) -> list[NDArray[Any]]:
        """Return the expert counts, unsigned[L,E], of the newest placed prompts, oldest first."""
        return list(self._state.leases.recent_counts)

    async def pending_counts(self) -> list[NDArray[Any]]:
        """Return the expert counts, unsigned[L,E], of decoding requests, then of queued requests."""
        return self._state.placer.pending_counts()

    async def report_pool(self, status: dict[str, Any]) -> RouterView:
        """Store the signature pool's status; return the router's state for the pool."""
        return self._pool.report(self._state, status)

    async def swap_fitted_table(self, table: bytes, epoch: str, version: int, refit: bool) -> int | None:
        """Swap in a table of the pool for this state; see RouterState.swap_fitted_table."""
        if self._state.epoch != epoch:
            return None
        return self._state.swap_fitted_table(table, version, refit=refit)

    async def status(self) -> dict[str, Any]:
        """Return the router's part of `GET /eldr/status`."""
        return router_status(self._state) | self._pool.status() | self._loop_status()

    async def live(self) -> dict[str, Any]:
        """Return the router's part of `GET /eldr/live`."""
        return live_status(self._state) | self._pool.status() | self._loop_status()

    def _loop_status(self) -> dict[str, Any]:
        return {"loops": {self._watch.role: self._watch.status()}}

    async def _run_shadow(self) -> None:
        """Run the shadow in short slices, between which requests are placed."""
        while True:
            is_behind = self._state.comparison.catch_up(_SHADOW_WORK_S)
            await asyncio.sleep(_SHADOW_PAUSE_S if is_behind else _SHADOW_PERIOD_S)

    async def _export(self) -> None:
        while True:
            await asyncio.sleep(PERIOD_S)
            self._metrics.export(self._state, self._pool.status()["signatures"])

    async def _exit_when_idle(self) -> None:
        """Exit after a long time without ingresses."""
        while time.monotonic() - self._connected_at_s <= _IDLE_EXIT_S:
            await asyncio.sleep(PERIOD_S)
            if self._ingress_calls.has_ingresses:
                self._connected_at_s = time.monotonic()
        await self._pool.end()
        # exit_actor raises an exception, which would end only this task.
        ray.kill(ray.get_runtime_context().current_actor)


def _new_state(settings: RouterSettings, previous: LiveSettings | None = None) -> RouterState:
    """Return a new state; raise SwapRefusedError if the settings are invalid.

    Args:
        previous: live settings that the new state overrides.
    """
    state = RouterState(
        model_id=settings.model_id,
        policy=settings.policy,
        parameters=settings.parameters,
        shadow=settings.shadow,
        table=settings.table,
        predictor=settings.predictor,
        cost=settings.cost,
        adapters=LoadedAdapters(settings.adapters, settings.adapter_slots),
        seed=settings.seed,
    )
    state.set_patience(settings.patience_s)
    state.live_settings.set_deployed_fingerprint(settings.fingerprint, overrides=previous)
    return state


def _error_response(method: str, error: Exception) -> tuple[int, bytes]:
    if isinstance(error, SwapRefusedError):
        return 400, str(error).encode()
    logger.error("the call %s failed", method, exc_info=error)
    return 500, one_line_message(error).encode()


def actor_name(application: str) -> str:
    """Return the name of a deployment's DecodeRouter in the Ray namespace `eldr`."""
    return f"decode-router:{application}"


def connect(name: str, settings: RouterSettings) -> ActorHandle:
    """Return the named DecodeRouter; start it if there is none."""
    return start_actor(DecodeRouter, name, settings)
