"""The router's end of its ingresses' open calls: one subscription per ingress, one lease per request.

Releases, and leases that ingresses hold already, are applied at once. Progress and requests for leases form a
batch: they are collected during one iteration of the event loop, and applied together in the next iteration.
"""

from __future__ import annotations

import asyncio
import logging
import time

from eldr_serve.channel import Reply
from eldr_serve.channel.server import OpenMethod
from eldr_serve.router.metrics_export import RouterMetrics
from eldr_serve.router.state import RouterState
from eldr_serve.router_protocol.messages import (
    NO_WORKER,
    ROUTER_ERROR,
    Counted,
    Granted,
    IngressReport,
    LiveSettings,
    Place,
    Queued,
    Restore,
    Unplaced,
    WorkerPositions,
    Workers,
    decoder,
    encode,
)
from eldr_serve.scheduling.types import Lease, LeaseState

logger = logging.getLogger(__name__)

_decode_restore, _decode_subscription_note = decoder(Restore), decoder(Workers | IngressReport)
_decode_place, _decode_place_note = decoder(Place), decoder(Place | Counted)
_QUEUED = encode(Queued())


class IngressCalls:
    """The open calls of all ingresses.

    Args:
        state: the state that the calls change.
        metrics: the router's metrics.
        grace_s: time for an ingress to connect again after its channel is lost, until its leases are dropped.

    Attributes:
        state: the state that the calls change.
        open_methods: methods for ChannelServer.
        subscriptions: subscriptions by ingress, including lost ones until they are dropped.
        place_calls: open `place` calls by request id.
    """

    def __init__(self, state: RouterState, metrics: RouterMetrics, grace_s: float) -> None:
        self._metrics = metrics
        self.open_methods: dict[str, OpenMethod] = {"subscribe": self._subscribe, "place": self._open_place}
        self.subscriptions: dict[str, _Subscription] = {}
        self.place_calls: dict[str, _PlaceCall] = {}
        self._connected: dict[object, _Subscription] = {}  # subscriptions by connection, without lost ones
        self._pending_leases: list[Lease] = []  # `_run_batch` places them
        self._generated_tokens: dict[str, int] = {}  # totals by request id; `_run_batch` sets them
        self._is_scheduled = False
        self.replace_state(state, grace_s)

    def replace_state(self, state: RouterState, grace_s: float) -> None:
        """Apply further calls to this state; all ingresses connect again, and restore their leases in it."""
        self.state, self._grace_s = state, grace_s
        state.set_callbacks(
            on_granted=self._send_leases, on_settings=self._send_settings, on_positions=self._send_positions
        )
        for subscription in list(self._connected.values()):
            subscription.reply.peer.close("the router's settings have changed")

    @property
    def has_ingresses(self) -> bool:
        """Return whether an ingress is connected."""
        return bool(self._connected)

    def schedule_batch(self) -> None:
        """Apply the batch, and dispatch the decode queue, in the event loop's next iteration."""
        if not self._is_scheduled:
            self._is_scheduled = True
            asyncio.get_running_loop().call_soon(self._run_batch)

    # -- called by the calls ------------------------------------------------------------------------

    def add_report(self, ingress: str, report: IngressReport) -> None:
        """Record the streams that an ingress reports, and add its counts to the state."""
        self._metrics.record_streams(self.state, report.streams)
        self.state.ingresses.add_report(ingress, report)

    def add_pending(self, lease: Lease) -> None:
        """Add a requested lease to the batch."""
        self._pending_leases.append(lease)

    def add_generated_tokens(self, request_id: str, tokens: int) -> None:
        """Add a request's total of generated tokens to the batch."""
        self._generated_tokens[request_id] = tokens
        self.schedule_batch()

    def remove_call(self, request_id: str, call: _PlaceCall) -> bool:
        """Remove a request's call, unless a later one has replaced it; return whether it was removed."""
        if self.place_calls.get(request_id) is not call:
            return False
        del self.place_calls[request_id]
        return True

    def finish(self, request_id: str, tokens: int) -> None:
        """End a request; `tokens` is the length of its complete answer, or 0 if it is incomplete."""
        self._generated_tokens.pop(request_id, None)
        self.state.leases.finish(request_id, tokens, is_complete=tokens > 0)
        self.schedule_batch()

    def end_subscription(self, subscription: _Subscription) -> None:
        """End a subscription; end the ingress's leases too unless it returns in the grace period."""
        if self._connected.get(subscription.reply.peer) is subscription:
            del self._connected[subscription.reply.peer]
            asyncio.get_running_loop().call_later(self._grace_s, self._drop_ingress, subscription)

    def _drop_ingress(self, subscription: _Subscription) -> None:
        if self.subscriptions.get(subscription.ingress) is subscription:
            del self.subscriptions[subscription.ingress]
            self.state.ingresses.drop_ingress(subscription.ingress)

    # -- batches ------------------------------------------------------------------------------------

    def _run_batch(self) -> None:
        self._is_scheduled = False
        generated_tokens, self._generated_tokens = self._generated_tokens, {}
        pending = [lease for lease in self._pending_leases if lease.state is LeaseState.SENT]
        self._pending_leases = []
        started_at_s = time.perf_counter()
        has_failed = False
        try:
            self.state.leases.set_generated_tokens(generated_tokens)
        except Exception:  # the batch is placed nevertheless
            logger.exception("the router cannot set the tokens of %d requests", len(generated_tokens))
        try:
            self.state.leases.place(pending)
        except Exception:  # no request may wait for a broken router, so ingresses place them
            logger.exception("the router cannot place %d requests", len(pending))
            has_failed = True
        if pending:
            self._metrics.record_placement(self.state, time.perf_counter() - started_at_s)
        for lease in pending:
            call = self.place_calls.get(lease.request_id)
            if call is None:  # sending a reply has closed its ingress's channel
                continue
            if lease.state is LeaseState.QUEUED and not call.queued:
                call.queued = True
                call.reply.send(_QUEUED)
            elif lease.state is LeaseState.SENT and not self.state.leases.is_stale(lease.request):
                call.reply.send(encode(Unplaced(ROUTER_ERROR if has_failed else NO_WORKER)))
        if has_failed:
            self._send_leases(self._unsent_leases(pending))

    def _unsent_leases(self, pending: list[Lease]) -> list[Lease]:
        """Return the leases that the router has granted and not sent."""
        newest = {**self.state.placer.running, **{lease.request_id: lease for lease in pending}}
        return [
            lease
            for request_id, lease in newest.items()
            if lease.state is LeaseState.GRANTED
            and (call := self.place_calls.get(request_id)) is not None
            and not call.has_lease
        ]

    def _send_leases(self, leases: list[Lease]) -> None:
        for lease in leases:
            call = self.place_calls.get(lease.request_id)
            if call is None:  # its ingress is lost, or connects again
                continue
            if call.queued:
                self._metrics.record_wait(self.state, lease)
            call.has_lease = True
            call.reply.send(encode(Granted.from_lease(lease)))
        self._metrics.record_leases(self.state, leases)

    def _send_settings(self, settings: LiveSettings) -> None:
        message = encode(settings)
        for subscription in list(self._connected.values()):
            subscription.reply.send(message)

    def _send_positions(self, positions: tuple[str | None, ...]) -> None:
        message = encode(WorkerPositions(positions))
        for subscription in list(self._connected.values()):
            if subscription.reads_positions:
                subscription.reply.send(message)

    # -- new calls --------------------------------------------------------------------------------

    def _subscribe(self, body: bytes, reply: Reply) -> _Subscription:
        message: Restore = _decode_restore(body)
        previous = self.subscriptions.get(message.ingress)
        if previous is not None and previous.reply.peer is not reply.peer:
            previous.reply.peer.close("its ingress has connected again")  # its further messages are outdated
        self.state.restore_from_ingress(message)
        subscription = _Subscription(
            self, message.ingress, reply, reads_positions=message.positions is not None
        )
        self.subscriptions[message.ingress] = self._connected[reply.peer] = subscription
        reply.send(encode(self.state.settings))
        if subscription.reads_positions:
            reply.send(encode(WorkerPositions(tuple(self.state.positions.workers))))
        return subscription

    def _open_place(self, body: bytes, reply: Reply) -> _PlaceCall:
        if reply.peer not in self._connected:
            raise ConnectionError("an ingress must subscribe before it places requests")
        message: Place = _decode_place(body)
        call = _PlaceCall(self, self._connected[reply.peer].ingress, reply, message.request.request_id)
        self.place_calls[message.request.request_id] = call
        try:
            call.place(message)
        except Exception:  # the ingress gets a FAIL frame, and will not close the call
            call.on_close(0)
            raise
        return call


class _Subscription:
    """An ingress's subscription to settings and positions; an older ingress cannot read positions."""

    def __init__(
        self, ingress_calls: IngressCalls, ingress: str, reply: Reply, *, reads_positions: bool
    ) -> None:
        self._ingress_calls, self.ingress, self.reply = ingress_calls, ingress, reply
        self.reads_positions = reads_positions

    def on_note(self, payload: bytes, tokens: int) -> None:
        """Apply the ingress's list of decode workers, or its report."""
        message = _decode_subscription_note(payload)
        if isinstance(message, Workers):
            self._ingress_calls.state.ingresses.set_reachable_workers(self.ingress, message.workers)
        else:
            self._ingress_calls.add_report(self.ingress, message)

    def on_close(self, tokens: int) -> None:
        self.on_lost()

    def on_lost(self) -> None:
        """Begin the grace period."""
        self._ingress_calls.end_subscription(self)


class _PlaceCall:
    """The open call of a request's lease."""

    __slots__ = ("_ingress", "_ingress_calls", "_pending", "_request_id", "has_lease", "queued", "reply")

    def __init__(self, ingress_calls: IngressCalls, ingress: str, reply: Reply, request_id: str) -> None:
        self._ingress_calls, self._ingress, self._request_id = ingress_calls, ingress, request_id
        self.reply = reply
        self.queued = self.has_lease = False
        self._pending: Lease | None = None  # newest requested lease; `_withdraw` ends it while it is SENT

    def place(self, message: Place) -> None:
        """Ask for a lease, or adopt the one that the ingress holds."""
        self._withdraw()
        self.has_lease = message.lease is not None
        lease = Lease(
            message.request, LeaseState.SENT, self._ingress, generated_tokens=message.generated_tokens
        )
        if message.lease is None:
            self._pending = lease
            self._ingress_calls.add_pending(lease)
        else:
            message.lease.copy_to(lease)
            self._ingress_calls.state.leases.adopt_lease(lease)
        self._ingress_calls.schedule_batch()

    def _withdraw(self) -> None:
        if self._pending is not None and self._pending.state is LeaseState.SENT:
            self._pending.become(LeaseState.ENDED)
        self._pending = None

    def on_note(self, payload: bytes, tokens: int) -> None:
        """Record progress (an empty note) or measured counts, or place the request again."""
        state = self._ingress_calls.state
        if not payload:
            self._ingress_calls.add_generated_tokens(self._request_id, tokens)
            return
        message = _decode_place_note(payload)
        if isinstance(message, Counted):
            state.leases.set_measured_counts(message.request)
            self._ingress_calls.schedule_batch()
        elif message.lease is not None or not state.leases.is_running(self._request_id):
            try:
                self.place(message)
            except Exception:  # it would close the channel, with the calls of all other requests
                logger.exception("the router cannot place request %s again", self._request_id)
                self._withdraw()
                self._ingress_calls.finish(self._request_id, 0)

    def on_close(self, tokens: int) -> None:
        if self._ingress_calls.remove_call(self._request_id, self):
            self._withdraw()
            self._ingress_calls.finish(self._request_id, tokens)

    def on_lost(self) -> None:
        self._withdraw()
        self._ingress_calls.remove_call(self._request_id, self)
