"""Client of the DecodeRouter actor: scores the requests of one process, which the actor then places.

Each request has a Placement, whose state determines the next step (`State`):

    SCORED  --sent with the next call-->      SENT
    SENT    --the router has a worker-->      LEASED
            --no worker is free-->            QUEUED   in the router's decode queue, for at most `wait_s`
            --it has another table-->         SCORED   twice; then load alone decides
    QUEUED  --a worker is free-->             LEASED
            --another table or router-->      SCORED   sent again, without losing its turn
    any     --the router does not answer-->   LEASED   by own load; reported when the router is back
    any     --released, cancelled, late-->    DONE
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import uuid
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eldr_serve.errors import Overloaded
from eldr_serve.experts.online_predictor import OnlinePredictor
from eldr_serve.experts.routing_table import ArtifactError, RoutingTable
from eldr_serve.experts.signature_predictor import SignaturePredictor
from eldr_serve.queues.wait_estimate import WaitEstimate
from eldr_serve.router.directory import Replicas
from eldr_serve.router.link import Router, RouterLink
from eldr_serve.router.messages import Answered, Exchange, Settings
from eldr_serve.router.own_load import OwnLoad
from eldr_serve.scheduling import Placement, PlacementRequest, State

logger = logging.getLogger(__name__)

_RESCORES = 2
_MOST_ANSWERED = 1024  # newest ended streams that are kept until they are reported
_SAMPLE_EVERY = 16  # one in this many signatures is reported even if the policy reads none


class RouterClient:
    """Places, tracks and releases the requests of one process. Lives in one event loop.

    Args:
        router, replicas, timeout_s: see RouterLink; if the actor takes longer, own load decides.
        on_predictor: called when a predictor is loaded, which needs prompts' token ids.
    """

    def __init__(
        self,
        router: Router,
        replicas: Replicas,
        *,
        timeout_s: float = 1.0,
        on_predictor: Callable[[], None] = lambda: None,
    ) -> None:
        self._id = uuid.uuid4().hex
        self.link = RouterLink(self._id, router, replicas, self, timeout_s=timeout_s)
        self._own = OwnLoad(replicas)
        self._scorings = itertools.count()
        self._table: RoutingTable | None = None
        self._table_file: bytes | None = None  # that the table was read from
        self.on_predictor = on_predictor
        self.predictor: OnlinePredictor | None = None
        self._predictor_file: bytes | None = None
        self.tokenizer: str | None = None  # fingerprint of the served tokenizer; None until known
        self.placements: dict[str, Placement] = {}  # those that are not DONE
        self._answers: dict[str, asyncio.Future[None]] = {}  # of requests in `place`
        self._in_queue = 0  # requests of this process in the decode queue
        self._waits = WaitEstimate(clock=lambda: asyncio.get_running_loop().time())
        # To be reported to the actor.
        self._unsent: dict[str, Placement] = {}  # may include placements that are no longer SCORED
        self._released: list[str] = []
        self._progress: dict[str, int] = {}
        self._new_leases: set[str] = set()
        self._new_counts: set[str] = set()
        self._events: Counter[str] = Counter()
        self._finished: deque[Answered] = deque(maxlen=_MOST_ANSWERED)
        self.signature_shape: tuple[int, int] | None = None  # as engines report it
        self.start, self.stop = self.link.start, self.link.stop

    @property
    def name(self) -> str:
        """Return the id of this client at the actor."""
        return self._id

    @property
    def router_away(self) -> bool:
        """Return whether the last call to the actor failed; placements are then made by own load."""
        return self.link.away

    @property
    def leases(self) -> int:
        """Return the number of leases of this process."""
        return sum(p.state is State.LEASED for p in self.placements.values())

    async def call(self, method: str, *args: Any) -> Any:
        """Call any other method of the actor (see RouterLink.call).

        Send the shape of signatures before each table or predictor, since a restarted actor does not know it.
        """
        if method == "expect_signatures":
            layers, experts = args
            self.signature_shape = (layers, experts)
        elif method in ("swap_table", "swap_predictor") and self.signature_shape is not None:
            await self.link.call("expect_signatures", *self.signature_shape)
        return await self.link.call(method, *args)

    # -- one request -----------------------------------------------------------------------------

    async def place(
        self,
        request: PlacementRequest,
        counts: NDArray[Any] | None,
        *,
        token_ids: NDArray[np.uint32] | None = None,
        wait_s: float = 0.0,
    ) -> Placement:
        """Lease a decode worker. If the router cannot decide, own load does.

        Args:
            request: the request without signature, similarity and may_wait, which are set here.
            counts: unsigned[L,E], the prompt's expert counts; None if prefill returned none. They are then
                predicted if there is a predictor.
            token_ids: uint32[n], the prompt's token ids, if known.
            wait_s: maximum wait in the decode queue, s; 0: place at once.

        Raises:
            Overloaded: no decode replica is known, or none was free in time.
        """
        until_s = asyncio.get_running_loop().time() + wait_s
        true = counts
        if counts is None and token_ids is not None and self.predictor is not None:
            counts = self.predictor.predict(token_ids)
        predicted = true is None and counts is not None
        placement = Placement(
            replace(request, signature=counts, predicted=predicted, may_wait=wait_s > 0), since_s=until_s
        )
        self.placements[request.request_id] = placement
        try:
            for rescore in range(_RESCORES + 2):
                if self.router_away or placement.state is State.LEASED:
                    break
                if rescore > _RESCORES:  # tables change faster than we score: load alone decides
                    placement.request = replace(placement.request, signature=None)
                answer = self._answers[request.request_id] = asyncio.get_running_loop().create_future()
                self._submit(placement)
                # Not wait_for: in Python 3.11 it swallows a cancellation that meets a finished answer, and
                # the request of a disconnected client would keep running.
                await answer
            if placement.state is not State.LEASED:
                placement.request = replace(placement.request, signature=counts)
                self._lease_by_own_load(placement)
        except BaseException:
            # The request may be queued or hold a lease by now, or a reply with a lease may be in transit.
            self.release(request.request_id)
            raise
        if true is not None and token_ids is not None:
            self._train(token_ids, true, len(token_ids))
        return placement

    def counted(
        self, request_id: str, token_ids: NDArray[np.uint32], counts: NDArray[Any], prompt_tokens: int
    ) -> None:
        """Take the true expert counts of a placed request's prompt from its engine.

        Args:
            token_ids: uint32[n] from which the counts were predicted.
            counts: unsigned[L,E].
            prompt_tokens: number of counted tokens, including a chat template's, which `token_ids` lack.
        """
        self._train(token_ids, counts, prompt_tokens)
        placement = self.placements.get(request_id)
        if placement is not None and placement.state is State.LEASED:
            placement.request = replace(
                placement.request,
                signature=self._sampled_counts(counts),
                prompt_tokens=prompt_tokens,
                predicted=False,
            )
            self._own.add(placement)
            self._new_counts.add(request_id)
            self.link.wake_soon()

    def progress(self, request_id: str, generated_tokens: int) -> None:
        """Update the number of tokens generated so far; it is reported periodically."""
        placement = self.placements.get(request_id)
        if placement is not None:
            placement.generated_tokens = self._progress[request_id] = generated_tokens
            self._own.progress(request_id, generated_tokens)

    def release(self, request_id: str) -> None:
        """End a request's lease or its wait for one. Further calls have no effect.

        Its final number of tokens is reported with the release, since policies learn lengths from it.
        """
        placement = self.placements.pop(request_id, None)
        if placement is not None:
            placement.become(State.DONE)
            self._own.release(request_id)
            self._new_leases.discard(request_id)
            self._new_counts.discard(request_id)
            answer = self._answers.pop(request_id, None)
            if answer is not None:
                answer.cancel()  # nothing waits for it any more
            self._report_release(request_id)

    def count(self, event: str) -> None:
        """Increment a counter of `/eldr/status`."""
        self._events[event] += 1

    def answered_client(self, answered: Answered) -> None:
        """Record the latencies of an ended stream, for the live page."""
        self._finished.append(answered)

    # -- internals -------------------------------------------------------------------------------------

    def _submit(self, placement: Placement) -> None:
        """Send the placement with the next call."""
        if placement.state is not State.SCORED:
            placement.become(State.SCORED)
        self._unsent[placement.request_id] = placement
        self.link.wake()

    def _resume(self, placement: Placement) -> None:
        """Let `place` continue with this placement."""
        answer = self._answers.pop(placement.request_id, None)
        if answer is not None and not answer.done():
            answer.set_result(None)

    def _lease_by_own_load(self, placement: Placement) -> None:
        self._own.lease(placement, "router-away" if self.router_away else "no-worker")
        self.count("placed_by_own_load")
        self._drop_unread(placement)
        self._report_lease(placement.request_id)

    def _drop_unread(self, placement: Placement) -> None:
        """Drop what the live policy does not read; a restarted actor gets the rest with the lease."""
        placement.request = replace(
            placement.request, similarity=None, signature=self._counts_for_policy(placement.request.signature)
        )

    def _train(self, token_ids: NDArray[np.uint32], counts: NDArray[Any], prompt_tokens: int) -> None:
        if self.predictor is None or not prompt_tokens:
            return
        try:
            self.predictor.observe(token_ids, counts * (len(token_ids) / prompt_tokens))
        except ValueError as error:
            logger.error("the signature predictor cannot be used, nothing is predicted: %s", error)
            self.predictor = None

    def _counts_for_policy(self, counts: NDArray[Any] | None) -> NDArray[Any] | None:
        """Return the packed counts to send with a placement; None if the policy reads none."""
        settings = self.link.settings
        if counts is None or settings is None or not settings.read_counts:
            return None
        return _pack(counts)

    def _sampled_counts(self, counts: NDArray[Any]) -> NDArray[Any] | None:
        """Return the measured counts to report: those that the policy reads, or else a sample."""
        sampled = next(self._scorings) % _SAMPLE_EVERY == 0
        return _pack(counts) if sampled else self._counts_for_policy(counts)

    def _score(self, request: PlacementRequest) -> PlacementRequest:
        counts, settings = request.signature, self.link.settings
        if counts is None:
            return replace(request, signature_missing=True)
        read = self._counts_for_policy if request.predicted else self._sampled_counts
        request = replace(request, signature=read(counts))
        if self._table is None or settings is None:
            return request
        try:
            similarity = self._table.similarity(counts)
        except ValueError as error:
            logger.warning("the signature does not fit the live table: %s", error)
            return replace(request, signature_missing=True)
        return replace(request, similarity=similarity, table_version=settings.table_version)

    def _queue(self, placement: Placement) -> None:
        """Let a request wait in the decode queue until `since_s`; refuse it if it would wait longer."""
        placement.become(State.QUEUED)
        answer = self._answers.get(placement.request_id)
        loop = asyncio.get_running_loop()
        if answer is not None and loop.time() + self._waits.wait_s(self._in_queue + 1) > placement.since_s:
            self._expire(answer)
        elif answer is not None:
            timer = loop.call_at(placement.since_s, self._expire, answer)
            self._in_queue += 1
            answer.add_done_callback(lambda _: self._left_the_queue(timer))
        self.link.poll()

    def _left_the_queue(self, timer: asyncio.TimerHandle) -> None:
        timer.cancel()
        self._in_queue -= 1
        self._waits.departed(empty=not self._in_queue)

    def _expire(self, answer: asyncio.Future[None]) -> None:
        if not answer.done():
            self.count("queue_expired")
            retry_after_s = self._waits.retry_after_s(self._in_queue + 1)
            why = "no decode worker is free for this request in time"
            answer.set_exception(Overloaded(why, retry_after_s=retry_after_s))

    def _report_lease(self, request_id: str) -> None:
        """Report the worker of a lease to the actor."""
        self._new_leases.add(request_id)
        self.link.wake()

    def _report_release(self, request_id: str) -> None:
        self._released.append(request_id)
        self.link.wake_soon()

    # -- methods for the link (see router_link.LinkDelegate) -----------------------------------------

    def message(self, epoch: str) -> Exchange:
        sent = [placement for placement in self._unsent.values() if placement.state is State.SCORED]
        for placement in sent:
            placement.become(State.SENT)
        message = Exchange(
            self._id,
            tuple(self._score(placement.request) for placement in sent),
            tuple(self._released),
            self._progress,
            tuple(self.placements[request_id] for request_id in self._new_leases),
            # The blocks were sent with the placement.
            tuple(
                replace(self.placements[request_id].request, blocks=None) for request_id in self._new_counts
            ),
            epoch,
            dict(self._events),
            tuple(self._finished),
            None if self.predictor is None else self.predictor.status,
        )
        self._unsent, self._released, self._progress, self._new_leases = {}, [], {}, set()
        self._new_counts = set()
        self._events = Counter()
        self._finished.clear()
        return message

    def undelivered(self, message: Exchange) -> None:
        for request in message.placements:
            placement = self.placements.get(request.request_id)
            if placement is not None and placement.state is State.SENT:
                self._submit(placement)
        self._new_counts |= {request.request_id for request in message.counted} & self.placements.keys()
        self._events.update(message.events)
        self._finished = deque([*message.answered, *self._finished], maxlen=_MOST_ANSWERED)

    def answered(self, placements: tuple[Placement, ...]) -> None:
        for answer in placements:
            own = self.placements.get(answer.request_id)
            if own is None:
                continue  # released meanwhile; the release is reported
            if own.state is State.LEASED:
                if answer.state is State.LEASED and answer.replica != own.replica:
                    self._report_lease(answer.request_id)
            elif answer.state is State.LEASED:
                own.become(State.LEASED)
                own.replica, own.slot, own.band = answer.replica, answer.slot, answer.band
                own.similarity, own.best = answer.similarity, answer.best
                own.reason, own.policy, own.waited_s = answer.reason, answer.policy, answer.waited_s
                self._drop_unread(own)
                self._own.add(own)
                self._resume(own)
            elif own.state is State.SENT and answer.state is State.QUEUED:
                self._queue(own)
            elif own.state is State.SENT:
                self._resume(own)  # `place` scores and sends it again

    def snapshot(self) -> tuple[Placement, ...]:
        self._released, self._progress, self._new_leases = [], {}, set()
        return tuple(p for p in self.placements.values() if p.state is State.LEASED)

    def lost(self) -> None:
        for request_id in list(self._answers):
            self._resume(self.placements[request_id])

    def settings_changed(self, settings: Settings) -> None:
        if settings.table != self._table_file:
            self._table = RoutingTable.from_bytes(settings.table) if settings.table is not None else None
            self._table_file = settings.table
        if settings.predictor != self._predictor_file:
            self._predictor_file = settings.predictor
            self.predictor = self._load_predictor(settings.predictor)
            if self.predictor is not None:
                self.on_predictor()
        for placement in list(self._queued()):
            self._submit(placement)

    def _load_predictor(self, predictor: bytes | None) -> OnlinePredictor | None:
        if predictor is None:
            return None
        made = SignaturePredictor.from_bytes(predictor)
        try:
            made.require_fit(model=made.model, tokenizer=self.tokenizer, shape=self.signature_shape)
        except ArtifactError as error:
            logger.error("nothing is predicted: %s", error)
            return None
        return OnlinePredictor(made)

    def tokenised_by(self, fingerprint: str) -> None:
        """Set the fingerprint of the served tokenizer; a predictor for another one is discarded."""
        self.tokenizer = fingerprint
        if self.predictor is not None and self.predictor.predictor.tokenizer != fingerprint:
            self.predictor = self._load_predictor(self._predictor_file)

    @property
    def has_updates(self) -> bool:
        return bool(self._released or self._progress or self._events or self._finished or self._new_counts)

    @property
    def has_queued(self) -> bool:
        return any(self._queued())

    def _queued(self) -> Iterator[Placement]:
        found = (self.placements[request_id] for request_id in self._answers)
        return (placement for placement in found if placement.state is State.QUEUED)


def _pack(counts: NDArray[Any]) -> NDArray[Any]:
    """Return the counts in the smallest dtype."""
    return counts.astype(np.min_scalar_type(counts.max(initial=0).item()))
