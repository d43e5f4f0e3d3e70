"""An engine whose core has died, or stands still, though its replica lives: nobody calls it meanwhile."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress

import psutil

from eldr_serve.channel import ChannelServer
from eldr_serve.engine.protocol import Engine
from eldr_serve.errors import sentence
from eldr_serve.serving.watching import ReplicaMetrics

logger = logging.getLogger(__name__)

_PERIOD_S = 1.0


class EngineWatch:
    """Looks once a period, and at once when a call has failed; asks the core only while there are calls.

    A core that does not answer for a period is looked at: one that somebody has stopped is lost then.
    While the engine is lost its channel is closed to all, so that ingresses place elsewhere what it had.

    Args:
        engine: this replica's.
        channel: by which it is called.
        role: of this process, for the metrics.
        limit_s: a core that answers nothing for so long stands still, s. Time in which this process itself
            was stopped does not count.

    Attributes:
        proven: the engine has answered a client. Before that it may still compile, and takes its time.
        lost: why it is not called now, or None.
    """

    def __init__(self, engine: Engine, channel: ChannelServer, role: str, limit_s: float) -> None:
        self._engine = engine
        self._channel = channel
        self._role = role
        self._limit_s = limit_s
        self._metrics = ReplicaMetrics()
        self._failed = asyncio.Event()
        self.proven = False
        self.lost: str | None = None

    def failed(self) -> None:
        """A call has failed by the engine's fault."""
        self._failed.set()

    async def run(self) -> None:
        """Watch until the engine has died, or this is cancelled."""
        loop = asyncio.get_running_loop()
        self._metrics.begin(self._role)
        asked: asyncio.Task[None] | None = None
        silent_s = 0.0
        try:
            while not await self._has_died():
                if asked is not None and asked.done():
                    asked, silent_s = None, 0.0
                    self._found()
                if asked is None and (self.lost or self._channel.in_flight):
                    asked = loop.create_task(self._ask())
                if silent_s >= _PERIOD_S and self.lost is None and (stopped := _stopped_child()):
                    self._lose(f"process {stopped} of its core is stopped")
                if silent_s >= self._limit_s and self.proven:
                    self._lose(f"its core has answered nothing for {self._limit_s:g} s")
                waited_s = await self._wait()
                if asked is not None:
                    silent_s += waited_s
        finally:
            if asked is not None:
                asked.cancel()

    async def _ask(self) -> None:
        try:
            await self._engine.ping()
        except Exception as error:
            logger.info("the engine's core cannot be asked: %r", error)  # whether it has died is looked at

    async def _wait(self) -> float:
        """Until the next look; for how long, s, but no longer than a period: it was we who did not run."""
        loop = asyncio.get_running_loop()
        since = loop.time()
        try:
            async with asyncio.timeout(_PERIOD_S):
                await self._failed.wait()
        except TimeoutError:
            pass
        self._failed.clear()
        return min(loop.time() - since, _PERIOD_S)

    async def _has_died(self) -> bool:
        try:
            await self._engine.check_health()
        except Exception as error:
            self._lose(f"it has died: {sentence(error)}")
            return True
        return False

    def _lose(self, why: str) -> None:
        if self.lost is None:
            calls = self._channel.in_flight
            logger.error("the engine is lost, and so are %d calls: %s", calls, why)
            self._metrics.lost(self._role)
        self.lost = why
        self._channel.suspend(why)

    def _found(self) -> None:
        if self.lost is not None:
            logger.warning("the engine answers again and takes calls")
            self.lost = None
            self._channel.resume()


def _stopped_child() -> int | None:
    """The id of a process that this one has started, or one of its children, and that SIGSTOP holds."""
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):  # it has ended meanwhile
            if child.status() == psutil.STATUS_STOPPED:
                return int(child.pid)
    return None
