"""The DecodeRouter actor: one per deployment, detached and named, a thin shell around RouterState."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any, get_type_hints

import ray
from numpy.typing import NDArray
from ray.actor import ActorHandle

from eldr_serve.channel import Answer, ChannelServer
from eldr_serve.channel.actors import start_actor
from eldr_serve.channel.address import Address, open_channel
from eldr_serve.errors import SwapRefusedError, one_line_message
from eldr_serve.limits.shared_limits import SharedLimits
from eldr_serve.limits.tenants import Usage
from eldr_serve.monitoring.loop_watch import LoopWatch
from eldr_serve.monitoring.ray_metrics import PERIOD_S
from eldr_serve.monitoring.supervision import start_supervised
from eldr_serve.router.decode_loads import decode_loads
from eldr_serve.router.messages import NamedPolicy, Settings, decoder, encode
from eldr_serve.router.metrics import RouterMetrics
from eldr_serve.router.pool_link import PoolLink
from eldr_serve.router.sessions import Sessions
from eldr_serve.router.settings import RouterSettings
from eldr_serve.router.state import RouterState
from eldr_serve.router.status import live_status, router_status
from eldr_serve.scheduling import BlockChanges, DecodeLoads, PromptBlocks, StepSums
from eldr_serve.signatures.coordinator import RouterView

logger = logging.getLogger(__name__)

_IDLE_EXIT_S = 600.0  # without a connected ingress, before the actor exits
_SHADOW_WORK_S, _SHADOW_PAUSE_S, _SHADOW_PERIOD_S = 0.002, 0.004, 0.05


class DecodeRouter:
    """Live load, leases, the policy and the table of one deployment, shared by its ingresses."""

    def __init__(self, settings: RouterSettings) -> None:
        self._pool = PoolLink()
        self._metrics = RouterMetrics()
        self._state = _state_of(settings)
        self._pool.use(settings.pool)
        self._sessions = Sessions(self._state, self._metrics, settings.ingress_timeout_s)
        self._connected_at = time.monotonic()
        self._limits = SharedLimits()
        self._watch = LoopWatch("router")
        self._channel: asyncio.Future[tuple[Address, ChannelServer]] | None = None
        self._tasks = [
            start_supervised(name, run)
            for name, run in {
                "the export of metrics": self._export,
                "the exit of an idle router": self._exit_when_idle,
                "the shadow policy": self._run_shadow,
                "the watch of the event loop": self._watch.run,
            }.items()
        ]

    async def address(self) -> Address:
        """Return the address for the calls of ingresses (see RouterCalls)."""
        if self._channel is None or (self._channel.done() and self._channel.exception() is not None):
            self._channel = asyncio.ensure_future(self._open())
        return (await asyncio.shield(self._channel))[0]

    async def _open(self) -> tuple[Address, ChannelServer]:
        return await open_channel(self._answer, describe=_describe, open_methods=self._sessions.open_methods)

    async def _answer(self, method: str, header: dict[str, Any], body: bytes, answer: Answer) -> None:
        if method not in _ARGUMENTS:
            raise AttributeError(f"the router has no method {method!r}")
        result = await getattr(self, method)(*_ARGUMENTS[method](body))
        answer.send(encode(result))

    async def configure(self, settings: RouterSettings) -> None:
        """Restart the state if the deployed settings were changed.

        They replace what operators set before, which ingresses would restore. Ingresses restore the leases.

        Raises:
            SwapRefusedError: the settings are invalid; nothing was changed.
        """
        previous = self._state.settings
        changed = settings.fingerprint != previous.deployed
        state = _state_of(settings, previous) if changed else self._state
        self._pool.use(settings.pool)
        if changed:
            self._state = state
            self._sessions.grace_s = settings.ingress_timeout_s
            self._sessions.use(self._state)
            logger.warning(
                "the deployed router settings have changed: policy %s %s and %s replace %s %s and table %d",
                settings.policy,
                settings.parameters,
                "no table" if settings.table is None else "the table of the deployment",
                previous.policy,
                previous.parameters,
                previous.table_version,
            )

    async def settings(self) -> Settings:
        """Return the live policy and table."""
        return self._state.settings

    async def expect_counts(self, num_layers: int, num_experts: int) -> None:
        """Set the shape [L, E] of the expert counts that engines report."""
        self._state.expect_counts(num_layers, num_experts)

    async def observe_steps(
        self,
        steps: dict[str, StepSums],
        prefix_cache: tuple[int, int] = (0, 0),
        prefix_changes: BlockChanges | None = None,
    ) -> tuple[float, bool]:
        """Record recent step costs of a replica's workers, and size and changes of their prefix caches.

        Args:
            steps: recent steps of each worker, by name.

        Returns:
            The workers' share of the requests in the decode queue, and whether the contents of their prefix
            caches are known; otherwise the next report should have all blocks.
        """
        state = self._state
        is_known = [
            state.observe_steps(sums, worker, prefix_cache, prefix_changes) for worker, sums in steps.items()
        ]
        return len(steps) * state.queue_size / max(1, state.num_workers), all(is_known)

    async def set_policy(self, policy: str, parameters: dict[str, Any]) -> Settings:
        """Set the policy; change nothing and raise SwapRefusedError if it is unknown."""
        return self._state.set_policy(policy, parameters)

    async def set_shadow(self, shadow: NamedPolicy | None) -> Settings:
        """Set the shadow; change nothing and raise SwapRefusedError if it is unknown."""
        return self._state.set_shadow(shadow)

    async def swap_table(self, table: bytes) -> Settings:
        """Swap the table; change nothing and raise SwapRefusedError if it does not fit."""
        return self._state.swap_table(table)

    async def swap_predictor(self, predictor: bytes, tokenizer: str) -> Settings:
        """Swap the predictor; change nothing and raise SwapRefusedError if it does not fit."""
        return self._state.swap_predictor(predictor, tokenizer)

    async def share_limits(self, ingress: str, usage: Usage) -> dict[str, Usage]:
        """Record the usage of tenants at an ingress; return their usage at each other one."""
        return self._limits.exchange(ingress, usage)

    async def decode_loads(self, blocks: PromptBlocks | None) -> DecodeLoads:
        """Return the loads of all workers, to predict the latency of a request with these blocks."""
        return decode_loads(self._state, blocks)

    async def recent_counts(self) -> list[NDArray[Any]]:
        """Return the expert counts, unsigned[L,E], of recently placed prompts, the newest last."""
        return list(self._state.recent)

    async def pending_counts(self) -> list[NDArray[Any]]:
        """Return the expert counts, unsigned[L,E], of the requests that decode, then of those that wait."""
        return self._state.placer.pending_counts()

    async def report_pool(self, status: dict[str, Any]) -> RouterView:
        """Store the signature pool's status; return the router's state for the pool."""
        return self._pool.report(self._state, status)

    async def swap_fitted_table(self, table: bytes, epoch: str, version: int, refit: bool) -> int | None:
        """Swap in a table of the pool if this version is still live; return the new version.

        Return None if another table has become live in the meantime; that table is kept.

        Raises:
            SwapRefusedError: the table does not fit.
        """
        state = self._state
        if state.epoch != epoch or state.settings.table_version != version:
            return None
        live = state.swap_table(table)
        state.counters["refits"] += refit
        return live.table_version

    async def status(self) -> dict[str, Any]:
        """Return the router's part of `GET /eldr/status`."""
        return router_status(self._state) | self._pool.status() | self._loops()

    async def live(self) -> dict[str, Any]:
        """Return the router's part of `GET /eldr/live`."""
        return live_status(self._state) | self._pool.status() | self._loops()

    def _loops(self) -> dict[str, Any]:
        return {"loops": {self._watch.role: self._watch.status()}}

    async def _run_shadow(self) -> None:
        """Run the shadow in short slices, between which requests are placed."""
        while True:
            behind = self._state.comparison.catch_up(_SHADOW_WORK_S)
            await asyncio.sleep(_SHADOW_PAUSE_S if behind else _SHADOW_PERIOD_S)

    async def _export(self) -> None:
        while True:
            await asyncio.sleep(PERIOD_S)
            self._metrics.export(self._state, self._pool.status()["signatures"])

    async def _exit_when_idle(self) -> None:
        """Exit after a long time without ingresses."""
        while time.monotonic() - self._connected_at <= _IDLE_EXIT_S:
            await asyncio.sleep(PERIOD_S)
            if self._sessions.by_peer:
                self._connected_at = time.monotonic()
        await self._pool.end()
        # exit_actor would only end this task, by its exception.
        ray.kill(ray.get_runtime_context().current_actor)


def _state_of(settings: RouterSettings, previous: Settings | None = None) -> RouterState:
    """Return a new state; raise SwapRefusedError if the settings are invalid.

    Args:
        previous: live settings that these override.
    """
    arguments = {name: value for name, value in settings if name not in ("pool", "ingress_timeout_s")}
    state = RouterState(**arguments)
    state.set_deployed(settings.fingerprint, previous)
    return state


def _arguments(method: str) -> Any:
    """Return a decoder of the arguments of a method that ingresses may call."""
    hints = get_type_hints(getattr(DecodeRouter, method))
    del hints["return"]
    return decoder(tuple[tuple(hints.values())])  # type: ignore[misc]


_ARGUMENTS = {
    method: _arguments(method)
    for method in (
        "settings",
        "expect_counts",
        "set_policy",
        "set_shadow",
        "swap_table",
        "swap_predictor",
        "share_limits",
        "decode_loads",
        "status",
        "live",
    )
}


def _describe(error: Exception) -> tuple[int, bytes]:
    if isinstance(error, SwapRefusedError):
        return 400, str(error).encode()
    logger.error("a call failed", exc_info=error)
    return 500, one_line_message(error).encode()


def actor_name(application: str) -> str:
    """Return the name of a deployment's DecodeRouter in the Ray namespace `eldr`."""
    return f"decode-router:{application}"


def connect(name: str, settings: RouterSettings) -> ActorHandle:
    """Return the named DecodeRouter; start it if there is none."""
    return start_actor(DecodeRouter, name, settings)
