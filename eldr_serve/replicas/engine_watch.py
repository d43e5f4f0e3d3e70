"""The health check of an engine's core, in its replica: a replica whose core is lost takes no calls."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress

import psutil

from eldr_serve.channel import ChannelServer
from eldr_serve.engine.protocol import HasLifeCycle
from eldr_serve.errors import one_line_message
from eldr_serve.metrics import REPLICA
from eldr_serve.monitoring.ray_metrics import SMALLEST, ray_metrics

logger = logging.getLogger(__name__)

_PERIOD_S = 1.0


class ReplicaMetrics:
    """Metrics of one engine replica."""

    def __init__(self) -> None:
        self._ray_metrics = ray_metrics(REPLICA)

    def create_series(self, role: str) -> None:
        """Export the counter at zero, so that alerts see its first increase."""
        self._ray_metrics["eldr_engine_lost_total"].inc(SMALLEST, {"role": role})

    def count_loss(self, role: str) -> None:
        """Count a loss of the engine, permanent or temporary."""
        self._ray_metrics["eldr_engine_lost_total"].inc(1, {"role": role})


class EngineWatch:
    """Checks the engine once per period and as soon as a call fails; pings its core only during calls.

    A core that does not answer for a period counts as lost if a process of it is stopped (SIGSTOP).
    While the engine is lost its channel is suspended, so that ingresses place its requests elsewhere.

    Args:
        engine: the engine of this replica.
        channel_server: the channel server through which the engine is called.
        role: role of this process, for the metrics.
        timeout_s: seconds without an answer after which the core counts as hung. Time in which this process
            itself was stopped does not count.

    Attributes:
        has_answered: whether the engine has answered a client. Before, it may be compiling, so no limit
            applies.
        lost_reason: the reason why the engine is not called now, or None.
    """

    def __init__(
        self, engine: HasLifeCycle, channel_server: ChannelServer, role: str, timeout_s: float
    ) -> None:
        self._engine = engine
        self._channel_server = channel_server
        self._role = role
        self._timeout_s = timeout_s
        self._metrics = ReplicaMetrics()
        self._check_soon = asyncio.Event()
        self.has_answered = False
        self.lost_reason: str | None = None

    def check_soon(self) -> None:
        """Check the engine at once, after a call that failed because of the engine."""
        self._check_soon.set()

    async def run(self) -> None:
        """Watch until the engine dies or the task is cancelled."""
        loop = asyncio.get_running_loop()
        self._metrics.create_series(self._role)
        ping: asyncio.Task[bool] | None = None
        silent_s = 0.0
        try:
            while not await self._has_died():
                if ping is not None and ping.done():
                    if ping.result():
                        silent_s = 0.0
                        self._mark_recovered()
                    ping = None
                if ping is None:
                    if self.lost_reason or self._channel_server.in_flight:
                        ping = loop.create_task(self._ping())
                    else:
                        silent_s = 0.0
                if silent_s >= _PERIOD_S and self.lost_reason is None:
                    # Look in a thread, since this reads all of /proc.
                    stopped = await asyncio.to_thread(_stopped_child)
                    if stopped is not None:
                        self._mark_lost(f"process {stopped} of its core is stopped")
                if silent_s >= self._timeout_s and self.has_answered:
                    self._mark_lost(f"its core has answered nothing for {self._timeout_s:g} s")
                waited_s = await self._wait()
                if ping is not None:
                    silent_s += waited_s
        finally:
            if ping is not None:
                ping.cancel()

    async def _ping(self) -> bool:
        """Return whether the core has answered a ping."""
        try:
            await self._engine.ping()
        except Exception as error:
            logger.info("the ping of the engine's core failed: %r", error)  # `run` checks whether it has died
            return False
        return True

    async def _wait(self) -> float:
        """Wait for the next check; return the time waited, s, without stops of this process."""
        loop = asyncio.get_running_loop()
        started_at_s = loop.time()
        try:
            async with asyncio.timeout(_PERIOD_S):
                await self._check_soon.wait()
        except TimeoutError:
            pass
        self._check_soon.clear()
        return min(loop.time() - started_at_s, _PERIOD_S)

    async def _has_died(self) -> bool:
        try:
            await self._engine.check_health()
        except Exception as error:
            self._mark_lost(f"it has died: {one_line_message(error)}")
            return True
        return False

    def _mark_lost(self, why: str) -> None:
        if self.lost_reason is None:
            logger.error("lost the engine (%s); %d calls failed", why, self._channel_server.in_flight)
            self._metrics.count_loss(self._role)
        self.lost_reason = why
        self._channel_server.suspend(why)

    def _mark_recovered(self) -> None:
        if self.lost_reason is not None:
            logger.warning("the engine answers again and takes calls")
            self.lost_reason = None
            self._channel_server.resume()


def _stopped_child() -> int | None:
    """Return the id of a descendant of this process that is stopped (SIGSTOP), or None."""
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):  # the child has ended meanwhile
            if child.status() == psutil.STATUS_STOPPED:
                return int(child.pid)
    return None
