"""The router's end of its ingresses' open calls: one subscription per ingress, one lease per request.

Releases, and leases that ingresses hold already, apply at once. Progress and requests for leases are
collected during one iteration of the event loop and applied together: the policy runs once for all of them.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

from eldr_serve.channel import Answer
from eldr_serve.channel.server import OpenMethod
from eldr_serve.router.messages import (
    Counted,
    IngressReport,
    Leased,
    Place,
    Queued,
    Restore,
    Settings,
    Unplaced,
    Workers,
    decoder,
    encode,
)
from eldr_serve.router.state import RouterState
from eldr_serve.scheduling import Lease, State

logger = logging.getLogger(__name__)

_restore, _subscription_note = decoder(Restore), decoder(Workers | IngressReport)
_place, _place_note = decoder(Place), decoder(Place | Counted)
_QUEUED, _UNPLACED = encode(Queued()), encode(Unplaced())


class Sessions:
    """The open calls of all ingresses.

    Args:
        grace_s: time for an ingress to connect again after its channel is lost, until its leases are dropped.
        metrics: RouterMetrics.

    Attributes:
        open_methods: methods for ChannelServer.
    """

    def __init__(self, state: RouterState, metrics: Any, grace_s: float) -> None:
        self.metrics, self.grace_s = metrics, grace_s
        self.open_methods: dict[str, OpenMethod] = {"subscribe": self._subscribe, "place": self._open_place}
        self.by_ingress: dict[str, _Subscription] = {}  # includes lost ones, until they are dropped
        self.by_peer: dict[object, _Subscription] = {}
        self.open: dict[str, _PlaceCall] = {}  # by request id
        self.pending: list[Lease] = []  # leases to place
        self.progress: dict[str, int] = {}  # totals of generated tokens, by request id
        self._scheduled = False
        self.use(state)

    def use(self, state: RouterState) -> None:
        """Serve another state; all ingresses connect again, and restore their leases in it."""
        self.state = state
        state.on_leases, state.on_settings = self._leased, self._push
        for subscription in list(self.by_peer.values()):
            subscription.answer.peer.close("the router's settings have changed")

    def apply_soon(self) -> None:
        """Apply all collected messages, and dispatch the decode queue, in the event loop's next iteration."""
        if not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._apply)

    def _apply(self) -> None:
        self._scheduled = False
        progress, self.progress = self.progress, {}
        pending, self.pending = [lease for lease in self.pending if lease.state is State.SENT], []
        began = time.perf_counter()
        try:
            self.state.progress(progress)
            self.state.place(pending)
        except Exception:  # no request may wait for a broken router; its ingress places it
            logger.exception("the router cannot place %d requests", len(pending))
        if pending:
            self.metrics.placed(self.state, time.perf_counter() - began)
        for lease in pending:
            call = self.open.get(lease.request_id)
            if call is None:  # an answer has closed its ingress's channel
                continue
            if lease.state is State.QUEUED and not call.queued:
                call.queued = True
                call.answer.send(_QUEUED)
            elif lease.state is State.SENT and not self.state.is_stale(lease.request):
                call.answer.send(_UNPLACED)

    def _leased(self, leased: list[Lease]) -> None:
        self.metrics.leased(self.state, leased)
        for lease in leased:
            call = self.open.get(lease.request_id)
            if call is None:  # its ingress is lost, or connects again
                continue
            if call.queued:
                self.metrics.waited(self.state, lease)
            call.answer.send(encode(Leased.from_lease(lease)))

    def _push(self, settings: Settings) -> None:
        message = encode(settings)
        for subscription in list(self.by_peer.values()):
            subscription.answer.send(message)

    # -- new calls --------------------------------------------------------------------------------

    def _subscribe(self, body: bytes, answer: Answer) -> _Subscription:
        message: Restore = _restore(body)
        before = self.by_ingress.get(message.ingress)
        if before is not None and before.answer.peer is not answer.peer:
            before.answer.peer.close("its ingress has connected again")  # what it still sends is outdated
        self.state.restore(message)
        subscription = _Subscription(self, message.ingress, answer)
        self.by_ingress[message.ingress] = self.by_peer[answer.peer] = subscription
        answer.send(encode(self.state.settings))
        return subscription

    def _open_place(self, body: bytes, answer: Answer) -> _PlaceCall:
        if answer.peer not in self.by_peer:
            raise ConnectionError("an ingress must subscribe before it places requests")
        message: Place = _place(body)
        call = _PlaceCall(self, self.by_peer[answer.peer].ingress, answer, message.request.request_id)
        self.open[message.request.request_id] = call
        call.place(message)
        return call


class _Subscription:
    """An ingress's subscription to settings."""

    def __init__(self, sessions: Sessions, ingress: str, answer: Answer) -> None:
        self._sessions, self.ingress, self.answer = sessions, ingress, answer

    def on_note(self, payload: bytes, tokens: int) -> None:
        message = _subscription_note(payload)
        if isinstance(message, Workers):
            self._sessions.state.update_workers(self.ingress, message.workers)
        else:
            self._sessions.metrics.answered(self._sessions.state, message.answered)
            self._sessions.state.report(self.ingress, message)

    def on_close(self, tokens: int) -> None:
        self.on_lost()

    def on_lost(self) -> None:
        """Begin the grace period."""
        sessions = self._sessions
        if sessions.by_peer.get(self.answer.peer) is self:
            del sessions.by_peer[self.answer.peer]
            asyncio.get_running_loop().call_later(sessions.grace_s, self._drop)

    def _drop(self) -> None:
        sessions = self._sessions
        if sessions.by_ingress.get(self.ingress) is self:
            del sessions.by_ingress[self.ingress]
            sessions.state.drop(self.ingress)


class _PlaceCall:
    """A request's lease, or its wait for one."""

    __slots__ = ("_ingress", "_pending", "_request_id", "_sessions", "answer", "queued")

    def __init__(self, sessions: Sessions, ingress: str, answer: Answer, request_id: str) -> None:
        self._sessions, self._ingress, self._request_id = sessions, ingress, request_id
        self.answer = answer
        self.queued = False
        self._pending: Lease | None = None  # not yet passed to the placer

    def place(self, message: Place) -> None:
        """Ask for a lease, or take the one that the ingress holds."""
        self._withdraw()
        lease = Lease(message.request, State.SENT, self._ingress)
        if message.lease is None:
            self._pending = lease
            self._sessions.pending.append(lease)
        else:
            message.lease.copy_to(lease)
            self._sessions.state.hold(lease)
        self._sessions.apply_soon()

    def _withdraw(self) -> None:
        if self._pending is not None and self._pending.state is State.SENT:
            self._pending.become(State.DONE)
        self._pending = None

    def on_note(self, payload: bytes, tokens: int) -> None:
        state = self._sessions.state
        if not payload:
            self._sessions.progress[self._request_id] = tokens
            self._sessions.apply_soon()
            return
        message = _place_note(payload)
        if isinstance(message, Counted):
            state.set_measured_counts(message.request)
            self._sessions.apply_soon()
        elif message.lease is not None or not state.is_running(self._request_id):
            self.place(message)

    def on_close(self, tokens: int) -> None:
        sessions = self._sessions
        if sessions.open.get(self._request_id) is self:
            self.on_lost()
            sessions.progress.pop(self._request_id, None)
            sessions.state.finish(self._request_id, tokens)
            sessions.apply_soon()

    def on_lost(self) -> None:
        self._withdraw()
        if self._sessions.open.get(self._request_id) is self:
            del self._sessions.open[self._request_id]
