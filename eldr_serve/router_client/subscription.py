"""Recovery of an ingress's connection to the DecodeRouter actor, with the leases that the ingress holds."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

from eldr_serve.channel import Channel, OpenCall
from eldr_serve.errors import SwapRefusedError
from eldr_serve.metrics import IngressEvent
from eldr_serve.monitoring.ingress_counters import IngressCounters
from eldr_serve.monitoring.supervision import start_supervised
from eldr_serve.router_client.calls import RouterCalls
from eldr_serve.router_client.scorer import Scorer
from eldr_serve.router_protocol import methods
from eldr_serve.router_protocol.messages import (
    IngressReport,
    LiveSettings,
    Place,
    Restore,
    WorkerPositions,
    Workers,
    decoder,
    encode,
)
from eldr_serve.router_protocol.methods import Arguments, Result, RouterMethod
from eldr_serve.scheduling.types import Lease

logger = logging.getLogger(__name__)

_RETRY_S, _MAX_RETRY_S = 0.1, 2.0
_FAST_RETRIES = 30  # retries that are enough for the restart of an actor
_decode_answer = decoder(LiveSettings | WorkerPositions)


class _UnreadableSettingsError(Exception):
    """The settings of the router cannot be used, such as a table of a newer version."""


def _retry_delays() -> Iterator[float]:
    """Yield the delay before each try to connect, s. It doubles after the fast tries."""
    yield from itertools.repeat(_RETRY_S, _FAST_RETRIES)
    delay_s = _RETRY_S
    while True:
        delay_s = min(2 * delay_s, _MAX_RETRY_S)
        yield delay_s


class SubscriptionOwner(Protocol):
    """The owner of a subscription: the client that has the requests of one ingress.

    Attributes:
        scorer: the settings and the shape of expert counts that the client knows.
    """

    scorer: Scorer

    def held_leases(self) -> list[Lease]:
        """Return the granted leases."""

    def send_leases(self, leases: Iterable[Lease]) -> None:
        """Send leases that the router does not know."""

    def send_waiting(self) -> None:
        """Send all waiting requests."""

    def on_settings(self, settings: LiveSettings) -> None:
        """Apply new settings."""

    def on_channel_lost(self) -> None:
        """Make requests wait for the next channel."""

    def on_router_unreachable(self) -> None:
        """End every request's wait for the router."""


class RouterSubscription:
    """Keeps one ingress connected to the actor, for one event loop.

    Args:
        name: id of the ingress at the actor.
        calls: calls to the actor.
        workers: returns the decode workers that requests can be placed on, sorted.
        owner: client whose leases the subscription restores after it has connected.
        timeout_s: maximum time for an answer of the actor, s.

    Attributes:
        connected: whether the actor has answered the subscription; until then the ingress sends no requests.
        unreachable: whether the actor did not answer in time; the ingress then places by local fallback.
    """

    def __init__(
        self,
        name: str,
        calls: RouterCalls,
        workers: Callable[[], tuple[str, ...]],
        owner: SubscriptionOwner,
        counters: IngressCounters,
        *,
        timeout_s: float,
    ) -> None:
        self._name = name
        self._router_calls = calls
        self._workers = workers
        self._owner, self._counters = owner, counters
        self._timeout_s = timeout_s
        self._channel: Channel | None = None
        self._subscription: OpenCall | None = None
        self._first_settings: asyncio.Future[None] | None = None
        self._reported_workers: tuple[str, ...] | None = None  # None until a worker is known
        self._positions: tuple[str | None, ...] = ()  # newest positions that the router has sent
        self._task: asyncio.Task[None] | None = None
        self._delays = _retry_delays()  # the delays start again after each success
        self._logged_reason = ""
        self.connected = self.unreachable = False

    def start(self) -> None:
        """Connect, and connect again after each loss; further calls have no effect."""
        if self._task is None:
            self._task = start_supervised("the connection to the router", self._run)

    async def stop(self) -> None:
        """Close the connection."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        self._router_calls.close()

    async def call(self, method: RouterMethod[Arguments, Result], arguments: Arguments) -> Result:
        """Call a method of the actor and return its result; see RouterCalls.call."""
        # wait_for of Python 3.11 would swallow a cancellation that meets a finished answer.
        async with asyncio.timeout(10 * self._timeout_s):
            return await self._router_calls.call(method, arguments)

    async def send_shape(self) -> None:
        """Send the shape of expert counts, if known; a restarted actor does not know it."""
        if self._owner.scorer.shape is not None:
            await self.call(methods.EXPECT_COUNTS, methods.CountsShape(*self._owner.scorer.shape))

    def place(
        self, message: Place, on_message: Callable[[bytes], None], on_failed: Callable[[Exception], None]
    ) -> OpenCall | None:
        """Open the call of a request; return None if there is no channel."""
        if self._channel is None:
            return None
        self.report_workers()
        return self._channel.open_call("place", encode(message), on_message, on_failed)

    def report_workers(self) -> None:
        """Report the live decode workers if they have changed."""
        if self._subscription is None:
            return
        workers = self._known_workers()
        if workers is not None and workers != self._reported_workers:
            self._reported_workers = workers
            self._subscription.note(encode(Workers(workers)))

    def _known_workers(self) -> tuple[str, ...] | None:
        """Return the live decode workers; None until this ingress has found the first one."""
        workers = self._workers()
        return None if not workers and self._reported_workers is None else workers

    def report(self, report: IngressReport) -> None:
        """Send the counts of the ingress."""
        assert self._subscription is not None
        self._subscription.note(encode(report))

    def give_up(self, error: Exception) -> None:
        """Close the channel of a router that cannot be used; place by local fallback until it can."""
        is_unusable = isinstance(error, _UnreadableSettingsError | SwapRefusedError)
        reason = str(error) if is_unusable else f"DecodeRouter does not answer ({type(error).__name__})"
        if not self.unreachable or (is_unusable and reason != self._logged_reason):
            logger.warning("%s; local fallback places the requests", reason)
            self._logged_reason = reason
        if not self.unreachable:
            self._counters.count(IngressEvent.ROUTER_LOST)
        self.unreachable = True
        self._close_channel(reason)
        self._owner.on_router_unreachable()

    # -- internals -------------------------------------------------------------------------------

    async def _run(self) -> None:
        try:
            while True:
                try:
                    await self._connect_until_lost()
                except Exception as error:  # any error: no request may wait for a broken router
                    self.give_up(error)
                await asyncio.sleep(next(self._delays))
        finally:
            self._close_channel("the ingress stops")

    async def _connect_until_lost(self) -> None:
        """Connect and subscribe, then wait until the channel is lost."""
        first_settings = self._first_settings = asyncio.get_running_loop().create_future()
        async with asyncio.timeout(self._timeout_s):
            channel = await self._router_calls.get_channel()
        async with asyncio.timeout(10 * self._timeout_s):  # the router may have to build a new state
            await self._router_calls.configure(self._owner.scorer.settings)
        self._subscribe(channel)
        async with asyncio.timeout(self._timeout_s):
            await first_settings
        self._close_channel(await asyncio.shield(channel.closed))

    def _subscribe(self, channel: Channel) -> None:
        self._reported_workers = self._known_workers()
        leases = self._owner.held_leases()
        message = Restore(
            self._name,
            self._reported_workers,
            tuple(lease.request_id for lease in leases),
            self._owner.scorer.settings,
            self._owner.scorer.shape,
            self._positions,
        )
        self._subscription = channel.open_call("subscribe", encode(message), self._on_answer, self._on_failed)
        self._channel = channel
        self._owner.send_leases(leases)

    def _on_answer(self, payload: bytes) -> None:
        """Keep new positions, or apply new settings; the first settings answer the subscription."""
        try:
            answer = _decode_answer(payload)
            if isinstance(answer, WorkerPositions):
                self._positions = answer.workers
                return
            self._owner.on_settings(answer)
        except Exception as error:
            unreadable = _UnreadableSettingsError(f"the settings of DecodeRouter cannot be used: {error!r}")
            self._fail_first_settings(unreadable)
            self.give_up(unreadable)
            return
        if not self.connected:
            self.connected, self.unreachable = True, False
            self._delays = _retry_delays()
            self._owner.send_waiting()
        if self._first_settings is not None and not self._first_settings.done():
            self._first_settings.set_result(None)

    def _on_failed(self, error: Exception) -> None:
        self._close_channel(f"the subscription has failed: {error!r}")
        self._fail_first_settings(error)

    def _fail_first_settings(self, error: Exception) -> None:
        if self._first_settings is not None and not self._first_settings.done():
            self._first_settings.set_exception(error)

    def _close_channel(self, reason: str) -> None:
        """Close the channel, because it is lost or the router cannot be used."""
        channel, self._channel = self._channel, None
        if channel is not None:
            self._subscription, self.connected = None, False
            channel.close(reason)
            self._owner.on_channel_lost()
