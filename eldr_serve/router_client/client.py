"""The client of the DecodeRouter actor in an ingress, which gets a lease for each request.

docs/request_path.md describes a request's open `place` call and the states of its lease. If the router does
not answer in time, the ingress closes the channel, and local fallback decides until there is another channel.
Frames arrive in order, so no late message contradicts a newer one.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eldr_serve.actors import ACTOR_UNAVAILABLE
from eldr_serve.channel import CallFailedError, OpenCall
from eldr_serve.limits.tenants import Usage
from eldr_serve.metrics import IngressEvent
from eldr_serve.monitoring.ingress_counters import IngressCounters
from eldr_serve.monitoring.supervision import start_supervised
from eldr_serve.router_client.calls import RouterCalls
from eldr_serve.router_client.local_fallback import LocalFallback
from eldr_serve.router_client.operator_calls import OperatorCalls
from eldr_serve.router_client.scorer import Scorer
from eldr_serve.router_client.subscription import RouterSubscription
from eldr_serve.router_client.waiting import WaitingRequests
from eldr_serve.router_protocol import methods
from eldr_serve.router_protocol.messages import (
    ROUTER_ERROR,
    ROUTER_UNREACHABLE,
    Counted,
    Granted,
    IngressReport,
    LiveSettings,
    Place,
    Queued,
    StreamLatencies,
    Unplaced,
    decoder,
    encode,
)
from eldr_serve.scheduling import PlacementRequest
from eldr_serve.scheduling.decode_loads import DecodeLoads
from eldr_serve.scheduling.prefixes import PromptBlocks
from eldr_serve.scheduling.types import Lease, LeaseState

_MAX_STREAMS = 1024  # newest ended streams that are kept until they are reported
_REPORT_S = 0.25

_decode_reply = decoder(Granted | Queued | Unplaced)


class RouterClient:
    """Places, tracks and releases the requests of one ingress, in one event loop.

    Args:
        router_calls: calls to the actor.
        workers: see RouterSubscription.
        timeout_s: maximum time for an answer of the actor, s; after that, local fallback decides.
        counters: counters of the ingress, which this client reports to the actor.
        on_predictor: called when a predictor is loaded, which needs prompts' token ids.

    Attributes:
        name: id of this ingress at the actor.
        leases: leases that have not ended, by request id.
        scorer: the live settings and the predictor.
        operator: calls of the actor on behalf of operators, over this client's connection.
    """

    def __init__(
        self,
        router_calls: RouterCalls,
        workers: Callable[[], tuple[str, ...]],
        *,
        counters: IngressCounters | None = None,
        timeout_s: float = 1.0,
        on_predictor: Callable[[], None] = lambda: None,
    ) -> None:
        self.name = uuid.uuid4().hex
        self.scorer = Scorer(on_predictor)
        self.leases: dict[str, Lease] = {}
        self._counters = counters or IngressCounters()
        self._fallback = LocalFallback(workers)
        self._place_calls: dict[str, OpenCall] = {}  # open calls by request id
        self._reporting: asyncio.Task[None] | None = None
        # Sent by the next `_report`: ids of requests with progress, and latencies of ended streams.
        self._unreported: set[str] = set()
        self._ended_streams: deque[StreamLatencies] = deque(maxlen=_MAX_STREAMS)
        self._reported_prediction: dict[str, Any] | None = None
        self._subscription = RouterSubscription(
            self.name, router_calls, workers, self, self._counters, timeout_s=timeout_s
        )
        count_expired = partial(self._counters.count, IngressEvent.QUEUE_EXPIRED)
        self._waiting = WaitingRequests(timeout_s, self._subscription.give_up, count_expired)
        self.operator = OperatorCalls(self._subscription)

    def start(self) -> None:
        """Connect to the actor; further calls have no effect."""
        if self._reporting is None:
            self._subscription.start()
            self._reporting = start_supervised("the reports to the router", self._report_repeatedly)

    async def stop(self) -> None:
        """Close the connection."""
        if self._reporting is not None:
            self._reporting.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._reporting
        await self._subscription.stop()
        self._waiting.stop()

    @property
    def settings(self) -> LiveSettings | None:
        """Return the live settings; None until known."""
        return self.scorer.settings

    @property
    def router_unreachable(self) -> bool:
        """Return whether the actor did not answer in time; local fallback then places the requests."""
        return self._subscription.unreachable

    def held_leases(self) -> list[Lease]:
        """Return the granted leases."""
        return [lease for lease in self.leases.values() if lease.state is LeaseState.GRANTED]

    # -- other methods of the actor, see DecodeRouter; for the exceptions see RouterCalls.call --------

    async def expect_counts(self, num_layers: int, num_experts: int) -> None:
        """Set the shape of the expert counts that prompts will have, here and at the router."""
        self.scorer.shape = (num_layers, num_experts)
        await self._subscription.send_shape()

    async def share_limits(self, ingress: str, usage: Usage) -> dict[str, Usage]:
        """Exchange tenants' usage with other ingresses; raise ConnectionError if the router cannot answer."""
        try:
            return await self._subscription.call(methods.SHARE_LIMITS, methods.UsageArguments(ingress, usage))
        except ACTOR_UNAVAILABLE as error:
            raise ConnectionError(f"the router does not answer: {error!r}") from error

    async def decode_loads(self, blocks: PromptBlocks | None) -> DecodeLoads:
        """Return the loads of all decode workers; see DecodeRouter.decode_loads."""
        return await self._subscription.call(methods.DECODE_LOADS, methods.BlocksArguments(blocks))

    @property
    def queue_wait_s(self) -> float:
        """Return the predicted wait of a new request in the decode queue, s."""
        return self._waiting.queue_wait_s

    # -- one request -----------------------------------------------------------------------------

    async def place(
        self,
        request: PlacementRequest,
        counts: NDArray[Any] | None,
        *,
        token_ids: NDArray[np.uint32] | None = None,
        wait_s: float = 0.0,
        generated_tokens: int = 0,
    ) -> Lease:
        """Lease a decode worker. If the router cannot decide, local fallback does.

        Args:
            request: the request without expert counts, similarity and may_wait, which are set here.
            counts: unsigned[L,E], the expert counts of `request.counted_tokens` tokens; None if prefill
                returned none. They are then predicted if there is a predictor.
            token_ids: uint32[n], the prompt's token ids, if a predictor may read them.
            wait_s: maximum wait in the decode queue, s; 0: place at once.
            generated_tokens: number of tokens that the answer has already, if it is resumed.

        Raises:
            OverloadedError: no decode replica is known, or none was free in time.
        """
        self.release(request.request_id, is_complete=False)  # an earlier attempt may have left a lease
        measured_counts = counts
        counts = self.scorer.predict(token_ids) if measured_counts is None else measured_counts
        is_predicted = measured_counts is None and counts is not None
        placed_request = replace(request, expert_counts=counts, predicted=is_predicted, may_wait=wait_s > 0)
        lease = Lease(placed_request, generated_tokens=generated_tokens)
        self.leases[request.request_id] = lease
        unplaced_reason = ROUTER_UNREACHABLE
        try:
            if not self.router_unreachable:
                if self._subscription.connected:
                    self._send(lease)
                unplaced_reason = await self._waiting.wait(lease, wait_s)
            if lease.state is not LeaseState.GRANTED:
                self._lease_by_local_fallback(lease, unplaced_reason)
        except BaseException:
            self.release(request.request_id, is_complete=False)  # it may be queued or hold a lease by now
            raise
        is_first = not (generated_tokens or request.worker_failed)
        if is_first and measured_counts is not None and token_ids is not None:
            self.scorer.train(token_ids, measured_counts, len(token_ids))
        return lease

    def set_measured_counts(
        self, request_id: str, token_ids: NDArray[np.uint32] | None, counts: NDArray[Any], prompt_tokens: int
    ) -> None:
        """Set the expert counts of a placed request's prompt that its engine has measured.

        Args:
            token_ids: uint32[n] from which the counts were predicted; None if they were not.
            counts: unsigned[L,E].
            prompt_tokens: number of counted tokens, including a chat template's tokens, which `token_ids`
                lack.
        """
        if token_ids is not None:
            self.scorer.train(token_ids, counts, prompt_tokens)
        lease = self.leases.get(request_id)
        if lease is not None and lease.state is LeaseState.GRANTED:
            lease.request = replace(
                lease.request,
                expert_counts=self.scorer.sample_counts(counts),
                prompt_tokens=prompt_tokens,
                predicted=False,
            )
            if request_id in self._place_calls:  # the blocks were sent with the placement
                self._place_calls[request_id].note(encode(Counted(replace(lease.request, blocks=None))))

    def set_generated_tokens(self, request_id: str, generated_tokens: int) -> None:
        """Update the number of tokens generated so far; it is reported periodically."""
        lease = self.leases.get(request_id)
        if lease is not None:
            lease.generated_tokens = generated_tokens
            self._unreported.add(request_id)

    def release(self, request_id: str, *, is_complete: bool = True) -> None:
        """End a request's lease in any state. Further calls have no effect.

        The release of a complete answer reports its number of tokens, from which policies learn answer
        lengths; the release of an incomplete answer reports 0.
        """
        lease = self.leases.pop(request_id, None)
        if lease is None:
            return
        lease.become(LeaseState.ENDED)
        self._fallback.release(request_id)
        self._unreported.discard(request_id)
        self._waiting.cancel(request_id)
        call = self._place_calls.pop(request_id, None)
        if call is not None:
            call.close(lease.generated_tokens if is_complete else 0)

    def record_stream(self, latencies: StreamLatencies) -> None:
        """Record the latencies of an ended stream, for the live page."""
        self._ended_streams.append(latencies)

    # -- messages ----------------------------------------------------------------------------------

    def _send(self, lease: Lease, granted: Granted | None = None) -> None:
        """Send a request with scores for the live settings, or with the lease that it holds already."""
        request = lease.request if granted is not None else self.scorer.score(lease.request)
        message = Place(request, granted, lease.generated_tokens)
        call = self._place_calls.get(lease.request_id)
        if call is not None:
            call.note(encode(message))
            return
        call = self._subscription.place(
            message, partial(self._on_message, lease), partial(self._on_failed, lease)
        )
        if call is not None:
            self._place_calls[lease.request_id] = call
            if lease.state is LeaseState.UNSENT:
                lease.become(LeaseState.SENT)

    def _on_message(self, lease: Lease, payload: bytes) -> None:
        reply = _decode_reply(payload)
        if lease.state not in (LeaseState.SENT, LeaseState.QUEUED):
            return  # local fallback has placed the request meanwhile, and the router adopts that lease
        if isinstance(reply, Granted):
            reply.copy_to(lease)
            self._discard_unread_counts(lease)
            self._fallback.add(lease)
            self._waiting.resume(lease.request_id)
        elif isinstance(reply, Unplaced):
            self._waiting.resume(lease.request_id, reply.reason)
        elif lease.state is LeaseState.SENT:
            lease.become(LeaseState.QUEUED)
            self._waiting.queue_or_refuse(lease.request_id)

    def _on_failed(self, lease: Lease, error: Exception) -> None:
        if isinstance(error, CallFailedError) and self._place_calls.pop(lease.request_id, None) is not None:
            self._waiting.resume(lease.request_id, ROUTER_ERROR)

    def _lease_by_local_fallback(self, lease: Lease, reason: str) -> None:
        self._fallback.lease(lease, reason)
        self._counters.count(IngressEvent.PLACED_BY_LOCAL_FALLBACK)
        self._discard_unread_counts(lease)
        self.send_leases([lease])

    def _discard_unread_counts(self, lease: Lease) -> None:
        """Remove the lease's expert counts unless the live policy reads them."""
        counts = self.scorer.counts_for_policy(lease.request.expert_counts)
        lease.request = replace(lease.request, expert_counts=counts)

    # -- called by the subscription, see SubscriptionOwner ------------------------------------------

    def send_leases(self, leases: Iterable[Lease]) -> None:
        for lease in leases:
            self._send(lease, Granted.from_lease(lease))

    def send_waiting(self) -> None:
        for lease in self._waiting:
            self._send(lease)

    def on_settings(self, settings: LiveSettings) -> None:
        """Score requests with these settings, and send waiting requests if the router is connected."""
        self.scorer.apply_settings(settings)
        if self._subscription.connected:
            self.send_waiting()

    def on_channel_lost(self) -> None:
        self._place_calls.clear()
        self._waiting.wait_again()

    def on_router_unreachable(self) -> None:
        for lease in self._waiting:
            self._waiting.resume(lease.request_id, ROUTER_UNREACHABLE)

    # -- reports -----------------------------------------------------------------------------------

    async def _report_repeatedly(self) -> None:
        while True:
            await asyncio.sleep(_REPORT_S)
            if self._subscription.connected:
                self._report()

    def _report(self) -> None:
        self._subscription.report_workers()
        for request_id in self._unreported & self._place_calls.keys():
            self._place_calls[request_id].note(tokens=self.leases[request_id].generated_tokens)
        self._unreported.clear()
        prediction = None if self.scorer.predictor is None else self.scorer.predictor.status
        if prediction == self._reported_prediction:
            prediction = None
        counts = self._counters.take()
        if counts or self._ended_streams or prediction is not None:
            self._subscription.report(IngressReport(counts, tuple(self._ended_streams), prediction))
            self._ended_streams.clear()
            self._reported_prediction = prediction or self._reported_prediction
