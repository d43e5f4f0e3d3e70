"""The transport between a client and the DecodeRouter actor: batches, heartbeats, long polls, restores."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from typing import Any, Protocol

from eldr_serve.routing import Placement
from eldr_serve.serving.messages import Exchange, Reply, Restore, Restored, Settings
from eldr_serve.serving.replicas import Replicas

logger = logging.getLogger(__name__)

_HEARTBEAT_S = 5.0
_PROGRESS_S = 0.25
_RIDE_S = 0.02  # a call costs the actor more than the news is worth
_RECONNECT_S = 0.25
_POLL_S = 5.0


class Router(Protocol):
    """The actor, as a link calls it; see RouterCalls."""

    async def call(self, method: str, *args: Any) -> Any:
        """What the method of that name returns."""

    def close(self) -> None:
        """End the connection, if there is one."""


class Desk(Protocol):
    """Who a link talks for: the requests of one process."""

    def message(self, epoch: str) -> Exchange:
        """All that the actor has not been told, which counts as told from now on."""

    def undelivered(self, message: Exchange) -> None:
        """It has not been told after all; a snapshot goes before the next message."""

    def answered(self, placements: tuple[Placement, ...]) -> None:
        """What the actor made of requests, in reply to a message or out of its decode queue."""

    def snapshot(self) -> tuple[Placement, ...]:
        """All that hold a worker; whatever else the actor holds for this process has ended.

        Releases, progress and leases that were still to be told are in it.
        """

    def lost(self) -> None:
        """The actor does not answer: no request waits for it."""

    def count(self, event: str) -> None:
        """Add one to a counter."""

    def settings_changed(self, settings: Settings) -> None:
        """Another policy, table or actor: what is in the decode queue must be asked for again."""

    @property
    def signature_shape(self) -> tuple[int, int] | None:
        """Of the engines' signatures (MoE layers, experts), once it is known."""

    @property
    def has_news(self) -> bool:
        """Something that can wait for the next heartbeat should be told."""

    @property
    def waits(self) -> bool:
        """Some request is in the actor's decode queue."""


class RouterLink:
    """Lives in one event loop. While a call is under way whatever comes waits, and then goes together.

    Args:
        name: of this client, for the actor.
        router: the actor.
        replicas: the live decode replicas, as this process's request router knows them.
        timeout_s: how long the actor may take to answer.
    """

    def __init__(
        self,
        name: str,
        router: Router,
        replicas: Replicas,
        desk: Desk,
        *,
        timeout_s: float,
    ) -> None:
        self._name = name
        self._router = router
        self._replicas = replicas
        self._desk = desk
        self._timeout_s = timeout_s
        self._epoch = ""
        self._workers_told: tuple[str, ...] = ()
        self._news, self._polling = asyncio.Event(), asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self.settings: Settings | None = None
        self.away = False  # the actor did not answer the last call

    def start(self) -> None:
        """Begin talking to the actor; safe to call again."""
        if not self._tasks:
            self._tasks = [asyncio.create_task(run()) for run in (self._talk, self._beat, self._fetch)]

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        for task in self._tasks:
            with contextlib.suppress(asyncio.CancelledError):
                await task
        self._tasks = []
        self._router.close()

    def wake(self) -> None:
        """There is something to tell."""
        self._news.set()

    def wake_soon(self) -> None:
        """There is something to tell with the next call, if one goes soon, or else by itself."""
        asyncio.get_running_loop().call_later(_RIDE_S, self._wake_for_news)

    def _wake_for_news(self) -> None:
        if self._desk.has_news:
            self._news.set()

    def poll(self) -> None:
        """There is something to fetch out of the decode queue."""
        self._polling.set()

    async def call(self, method: str, *args: Any) -> Any:
        """Call any other method of the actor (status, set_policy, swap_table)."""
        async with asyncio.timeout(10 * self._timeout_s):
            result = await self._router.call(method, *args)
        if isinstance(result, Settings):
            self._take_settings(result)
        return result

    # -- its three tasks -------------------------------------------------------------------------

    async def _talk(self) -> None:
        while True:
            await self._news.wait()
            self._news.clear()
            try:
                await self._exchange()
                self.away = False
            except Exception as error:  # whatever it is: no request waits for a router that is broken
                self._lose(error)
            if self.away:
                await asyncio.sleep(_RECONNECT_S)
                self._news.set()

    async def _beat(self) -> None:
        last = 0.0
        while True:
            await asyncio.sleep(_PROGRESS_S)
            due = time.monotonic() - last > _HEARTBEAT_S
            if due or self._desk.has_news or self._workers_told != self._replicas.live:
                last = time.monotonic()
                self._news.set()

    async def _fetch(self) -> None:
        """Fetch leases out of the decode queue as long as requests wait there."""
        while True:
            await self._polling.wait()
            epoch = self._epoch
            if not self._desk.waits:
                self._polling.clear()
                continue
            try:
                self._desk.answered(await self._call("granted", self._name, _POLL_S, more_s=_POLL_S))
            except Exception as error:
                if self._epoch == epoch:
                    self._lose(error)
                    self._news.set()

    # -- one exchange ----------------------------------------------------------------------------

    async def _exchange(self) -> None:
        if not self._epoch:
            await self._restore()
        if self._workers_told != self._replicas.live:
            workers = self._replicas.live
            await self._call("update_workers", workers)
            self._workers_told = workers
        for _ in range(2):
            message = self._desk.message(self._epoch)
            try:
                reply: Reply = await self._call("exchange", message)
                if reply.refused is None:
                    break
            except BaseException:
                self._desk.undelivered(message)
                raise
            self._desk.undelivered(message)
            await self._restore()
        else:
            raise ConnectionError(reply.refused)
        if self.settings is None or reply.settings_version != self.settings.version:
            self._take_settings(await self._call("settings"))
        self._desk.answered(reply.placements)

    async def _restore(self) -> None:
        workers = self._replicas.live
        message = Restore(
            self._name, workers, self.settings, self._desk.snapshot(), self._desk.signature_shape
        )
        restored: Restored = await self._call("restore", message)
        self._epoch = restored.epoch
        self._workers_told = workers
        self.settings = restored.settings
        self._desk.settings_changed(restored.settings)

    def _lose(self, error: BaseException) -> None:
        if not self.away:
            logger.warning("DecodeRouter does not answer (%s); placing by own load", type(error).__name__)
            self._desk.count("router_lost")
        self.away = True
        self._epoch = ""  # it is told everything when it is back; until then nothing is kept for it
        self._desk.lost()

    def _take_settings(self, settings: Settings) -> None:
        if self.settings != settings:
            self.settings = settings
            self._desk.settings_changed(settings)

    async def _call(self, method: str, *args: Any, more_s: float = 0.0) -> Any:
        # No wait_for: in Python 3.11 it swallows a cancellation that meets a finished answer.
        async with asyncio.timeout(self._timeout_s + more_s):
            return await self._router.call(method, *args)
