"""Transport between a client and the DecodeRouter actor: batches, heartbeats, long polls, restores."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from typing import Any, Protocol

from eldr_serve.router.directory import Replicas
from eldr_serve.router.messages import Exchange, Reply, Restore, Restored, Settings
from eldr_serve.scheduling import Placement

logger = logging.getLogger(__name__)

_HEARTBEAT_S = 5.0
_PROGRESS_S = 0.25
_BATCH_DELAY_S = 0.02  # lets minor updates share a call
_RECONNECT_S = 0.25
_POLL_S = 5.0


class Router(Protocol):
    """Client of the actor; see RouterCalls."""

    async def call(self, method: str, *args: Any) -> Any:
        """Call a method of the actor and return its result."""

    def close(self) -> None:
        """Close the connection, if there is one."""


class LinkDelegate(Protocol):
    """The owner of a link, which holds the requests of one process."""

    def message(self, epoch: str) -> Exchange:
        """Return all unreported changes, which then count as reported."""

    def undelivered(self, message: Exchange) -> None:
        """Take back a message that was not delivered; a snapshot is sent before the next message."""

    def answered(self, placements: tuple[Placement, ...]) -> None:
        """Apply the actor's placements, from a reply or from the decode queue."""

    def snapshot(self) -> tuple[Placement, ...]:
        """Return all leases; the actor drops whatever else it holds for this process.

        This includes all unreported releases, progress and leases.
        """

    def lost(self) -> None:
        """Stop waiting for the actor, which does not answer."""

    def count(self, event: str) -> None:
        """Increment a counter."""

    def settings_changed(self, settings: Settings) -> None:
        """Apply new settings, and send requests in the decode queue again."""

    @property
    def signature_shape(self) -> tuple[int, int] | None:
        """Return the shape of signatures (MoE layers, experts); None until known."""

    @property
    def has_updates(self) -> bool:
        """Return whether there are minor updates to report."""

    @property
    def has_queued(self) -> bool:
        """Return whether any request is in the actor's decode queue."""


class RouterLink:
    """Sends a client's changes to the actor, for one event loop; changes during a call share the next one.

    Args:
        name: id of this client at the actor.
        router: client of the actor.
        replicas: live decode replicas, as this process's request router knows them.
        timeout_s: maximum time for an answer of the actor, s.
    """

    def __init__(
        self,
        name: str,
        router: Router,
        replicas: Replicas,
        delegate: LinkDelegate,
        *,
        timeout_s: float,
    ) -> None:
        self._name = name
        self._router = router
        self._replicas = replicas
        self._delegate = delegate
        self._timeout_s = timeout_s
        self._epoch = ""
        self._reported_workers: tuple[str, ...] = ()
        self._to_send, self._polling = asyncio.Event(), asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self.settings: Settings | None = None
        self.away = False  # the last call to the actor failed

    def start(self) -> None:
        """Start the link's tasks; further calls have no effect."""
        if not self._tasks:
            self._tasks = [asyncio.create_task(run()) for run in (self._send, self._heartbeat, self._fetch)]

    async def stop(self) -> None:
        """Stop the tasks and close the connection."""
        for task in self._tasks:
            task.cancel()
        for task in self._tasks:
            with contextlib.suppress(asyncio.CancelledError):
                await task
        self._tasks = []
        self._router.close()

    def wake(self) -> None:
        """Send a message now."""
        self._to_send.set()

    def wake_soon(self) -> None:
        """Send a message after a short delay, unless another one is sent before."""
        asyncio.get_running_loop().call_later(_BATCH_DELAY_S, self._wake_if_updated)

    def _wake_if_updated(self) -> None:
        if self._delegate.has_updates:
            self._to_send.set()

    def poll(self) -> None:
        """Fetch leases from the decode queue."""
        self._polling.set()

    async def call(self, method: str, *args: Any) -> Any:
        """Call any other method of the actor (status, set_policy, swap_table)."""
        async with asyncio.timeout(10 * self._timeout_s):
            result = await self._router.call(method, *args)
        if isinstance(result, Settings):
            self._take_settings(result)
        return result

    # -- the three tasks -------------------------------------------------------------------------

    async def _send(self) -> None:
        while True:
            await self._to_send.wait()
            self._to_send.clear()
            try:
                await self._exchange()
                self.away = False
            except Exception as error:  # any error: no request may wait for a broken router
                self._lose(error)
            if self.away:
                await asyncio.sleep(_RECONNECT_S)
                self._to_send.set()

    async def _heartbeat(self) -> None:
        last = 0.0
        while True:
            await asyncio.sleep(_PROGRESS_S)
            due = time.monotonic() - last > _HEARTBEAT_S
            if due or self._delegate.has_updates or self._reported_workers != self._replicas.live:
                last = time.monotonic()
                self._to_send.set()

    async def _fetch(self) -> None:
        """Fetch leases from the decode queue as long as requests wait there."""
        while True:
            await self._polling.wait()
            epoch = self._epoch
            if not self._delegate.has_queued:
                self._polling.clear()
                continue
            try:
                self._delegate.answered(await self._call("granted", self._name, _POLL_S, more_s=_POLL_S))
            except Exception as error:
                if self._epoch == epoch:
                    self._lose(error)
                    self._to_send.set()

    # -- one exchange ----------------------------------------------------------------------------

    async def _exchange(self) -> None:
        if not self._epoch:
            await self._restore()
        if self._reported_workers != self._replicas.live:
            workers = self._replicas.live
            await self._call("update_workers", workers)
            self._reported_workers = workers
        for _ in range(2):
            message = self._delegate.message(self._epoch)
            try:
                reply: Reply = await self._call("exchange", message)
                if reply.refused is None:
                    break
            except BaseException:
                self._delegate.undelivered(message)
                raise
            self._delegate.undelivered(message)
            await self._restore()
        else:
            raise ConnectionError(reply.refused)
        if self.settings is None or reply.settings_version != self.settings.version:
            self._take_settings(await self._call("settings"))
        self._delegate.answered(reply.placements)

    async def _restore(self) -> None:
        workers = self._replicas.live
        message = Restore(
            self._name, workers, self.settings, self._delegate.snapshot(), self._delegate.signature_shape
        )
        restored: Restored = await self._call("restore", message)
        self._epoch = restored.epoch
        self._reported_workers = workers
        self.settings = restored.settings
        self._delegate.settings_changed(restored.settings)

    def _lose(self, error: BaseException) -> None:
        if not self.away:
            logger.warning("DecodeRouter does not answer (%s); placing by own load", type(error).__name__)
            self._delegate.count("router_lost")
        self.away = True
        self._epoch = ""  # everything is sent again once the actor is back
        self._delegate.lost()

    def _take_settings(self, settings: Settings) -> None:
        if self.settings != settings:
            self.settings = settings
            self._delegate.settings_changed(settings)

    async def _call(self, method: str, *args: Any, more_s: float = 0.0) -> Any:
        # Not wait_for: in Python 3.11 it swallows a cancellation that meets a finished answer.
        async with asyncio.timeout(self._timeout_s + more_s):
            return await self._router.call(method, *args)
