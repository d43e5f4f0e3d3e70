"""The router's end of its clients' open calls: one subscription per client, one lease per request.

Releases and leases that clients hold apply at once. Progress and requests for leases are collected for one
turn of the event loop and applied together, so that the policy runs once for all that one read has brought.
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
    Leased,
    Place,
    Queued,
    Report,
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

_restore, _of_client = decoder(Restore), decoder(Workers | Report)
_place, _of_request = decoder(Place), decoder(Place | Counted)
_QUEUED, _UNPLACED = encode(Queued()), encode(Unplaced())


class Sessions:
    """The open calls of all clients.

    Args:
        grace_s: time for a client to connect again after its channel is lost, until its leases are dropped.
        metrics: RouterMetrics.

    Attributes:
        open_methods: methods for ChannelServer.
    """

    def __init__(self, state: RouterState, metrics: Any, grace_s: float) -> None:
        self.metrics, self.grace_s = metrics, grace_s
        self.open_methods: dict[str, OpenMethod] = {"subscribe": self._subscribe, "place": self._begin}
        self.by_client: dict[str, _Subscription] = {}  # includes lost ones, until they are dropped
        self.by_peer: dict[object, _Subscription] = {}
        self.open: dict[str, _PlaceCall] = {}  # by request id
        self.asked: list[Lease] = []
        self.tokens: dict[str, int] = {}  # progress, by request id
        self._due = False
        self.use(state)

    def use(self, state: RouterState) -> None:
        """Serve another state; all clients connect again, and restore their leases in it."""
        self.state = state
        state.on_leases, state.on_settings = self._leased, self._push
        for subscription in list(self.by_peer.values()):
            subscription.answer.peer.close("the router's settings have changed")

    def act_soon(self) -> None:
        """Apply what is collected, and dispatch the decode queue, at the end of this turn of the loop."""
        if not self._due:
            self._due = True
            asyncio.get_running_loop().call_soon(self._act)

    def _act(self) -> None:
        self._due = False
        tokens, self.tokens = self.tokens, {}
        asked, self.asked = [lease for lease in self.asked if lease.state is State.SENT], []
        began = time.perf_counter()
        try:
            self.state.progress(tokens)
            self.state.place(asked)
        except Exception:  # no request may wait for a broken router; its client places it
            logger.exception("the router cannot place %d requests", len(asked))
        if asked:
            self.metrics.placed(self.state, time.perf_counter() - began)
        for lease in asked:
            call = self.open[lease.request_id]
            if lease.state is State.QUEUED and not call.queued:
                call.queued = True
                call.answer.send(_QUEUED)
            elif lease.state is State.SENT and not self.state.is_stale(lease.request):
                call.answer.send(_UNPLACED)

    def _leased(self, leased: list[Lease]) -> None:
        self.metrics.leased(self.state, leased)
        for lease in leased:
            call = self.open.get(lease.request_id)
            if call is None:  # its client is lost, or connects again
                continue
            if call.queued:
                self.metrics.waited(self.state, lease)
            call.answer.send(encode(Leased.of(lease)))

    def _push(self, settings: Settings) -> None:
        message = encode(settings)
        for subscription in list(self.by_peer.values()):
            subscription.answer.send(message)

    # -- beginnings of calls -----------------------------------------------------------------------

    def _subscribe(self, body: bytes, answer: Answer) -> _Subscription:
        message: Restore = _restore(body)
        before = self.by_client.get(message.client)
        if before is not None and before.answer.peer is not answer.peer:
            before.answer.peer.close("its client has connected again")  # what it still sends is outdated
        self.state.restore(message)
        subscription = _Subscription(self, message.client, answer)
        self.by_client[message.client] = self.by_peer[answer.peer] = subscription
        answer.send(encode(self.state.settings))
        return subscription

    def _begin(self, body: bytes, answer: Answer) -> _PlaceCall:
        if answer.peer not in self.by_peer:
            raise ConnectionError("a client must subscribe before it places requests")
        message: Place = _place(body)
        call = _PlaceCall(self, self.by_peer[answer.peer].client, answer, message.request.request_id)
        self.open[message.request.request_id] = call
        call.place(message)
        return call


class _Subscription:
    """A client's subscription to settings."""

    def __init__(self, sessions: Sessions, client: str, answer: Answer) -> None:
        self._sessions, self.client, self.answer = sessions, client, answer

    def on_note(self, payload: bytes, tokens: int) -> None:
        message = _of_client(payload)
        if isinstance(message, Workers):
            self._sessions.state.update_workers(message.replicas)
        else:
            self._sessions.metrics.answered(self._sessions.state, message.answered)
            self._sessions.state.report(self.client, message)

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
        if sessions.by_client.get(self.client) is self:
            del sessions.by_client[self.client]
            sessions.state.drop(self.client)


class _PlaceCall:
    """A request's lease, or its wait for one."""

    __slots__ = ("_asked", "_client", "_request_id", "_sessions", "answer", "queued")

    def __init__(self, sessions: Sessions, client: str, answer: Answer, request_id: str) -> None:
        self._sessions, self._client, self._request_id = sessions, client, request_id
        self.answer = answer
        self.queued = False
        self._asked: Lease | None = None  # not yet with the placer

    def place(self, message: Place) -> None:
        """Ask for a lease, or take the one that the client holds."""
        self._withdraw()
        lease = Lease(message.request, State.SENT, self._client)
        if message.held is None:
            self._asked = lease
            self._sessions.asked.append(lease)
        else:
            message.held.copy_to(lease)
            self._sessions.state.hold(lease)
        self._sessions.act_soon()

    def _withdraw(self) -> None:
        if self._asked is not None and self._asked.state is State.SENT:
            self._asked.become(State.DONE)
        self._asked = None

    def on_note(self, payload: bytes, tokens: int) -> None:
        state = self._sessions.state
        if not payload:
            self._sessions.tokens[self._request_id] = tokens
            self._sessions.act_soon()
            return
        message = _of_request(payload)
        if isinstance(message, Counted):
            state.counted(message.request)
            self._sessions.act_soon()
        elif message.held is not None or self._request_id not in state.placer.running:
            self.place(message)

    def on_close(self, tokens: int) -> None:
        sessions = self._sessions
        if sessions.open.get(self._request_id) is self:
            self.on_lost()
            sessions.tokens.pop(self._request_id, None)
            sessions.state.finish(self._request_id, tokens)
            sessions.act_soon()

    def on_lost(self) -> None:
        self._withdraw()
        if self._sessions.open.get(self._request_id) is self:
            del self._sessions.open[self._request_id]
