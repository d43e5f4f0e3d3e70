"""The requests of one process on their way to decode workers: scored here, placed by the DecodeRouter actor.

Each is one Placement, and its state says what is done next (`State`):

    SCORED  --sent with the next call-->      SENT
    SENT    --the router has a worker-->      LEASED
            --it has none free-->             QUEUED   in its decode queue, until `wait_s` is over
            --it has another table-->         SCORED   twice; then load alone decides
    QUEUED  --a worker is free-->             LEASED
            --another table or router-->      SCORED   it is asked for again, and keeps its turn
    any     --the router does not answer-->   LEASED   by own load; the router learns of it when it is back
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

from eldr_serve.artifacts import ArtifactError, RoutingTable
from eldr_serve.errors import Overloaded
from eldr_serve.online_predictor import OnlinePredictor
from eldr_serve.routing import Placement, PlacementRequest, State
from eldr_serve.serving.messages import Answered, Exchange, Settings
from eldr_serve.serving.own_load import OwnLoad
from eldr_serve.serving.replicas import Replicas
from eldr_serve.serving.router_link import Router, RouterLink
from eldr_serve.serving.wait_estimate import WaitEstimate
from eldr_serve.signature_predictor import SignaturePredictor

logger = logging.getLogger(__name__)

_RESCORES = 2
_MOST_ANSWERED = 1024  # ended streams, the newest, that wait for the router to hear of them
_SAMPLED = 16  # one of so many requests tells the router its signature, whatever the policy reads


class RouterClient:
    """Places, tracks and releases the requests of one process. Lives in one event loop.

    Args:
        router, replicas, timeout_s: see RouterLink; a placement that takes the actor longer is made by own
            load.
        on_predictor: called as a predictor comes, which needs prompts' token ids.
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
        self._table_file: bytes | None = None  # that it was read from
        self.on_predictor = on_predictor
        self.predictor: OnlinePredictor | None = None
        self._predictor_file: bytes | None = None
        self.tokenizer: str | None = None  # fingerprint of the served one; None while it is not known
        self.placements: dict[str, Placement] = {}  # all that are not DONE
        self._answers: dict[str, asyncio.Future[None]] = {}  # of those that somebody waits for
        self._in_queue = 0  # requests of this process in the decode queue
        self._waits = WaitEstimate(clock=lambda: asyncio.get_running_loop().time())
        # What the actor is still to be told.
        self._unsent: dict[str, Placement] = {}  # SCORED ones, and such as are not any more
        self._released: list[str] = []
        self._progress: dict[str, int] = {}
        self._held: set[str] = set()
        self._counted: set[str] = set()
        self._events: Counter[str] = Counter()
        self._finished: deque[Answered] = deque(maxlen=_MOST_ANSWERED)
        self.signature_shape: tuple[int, int] | None = None  # as engines report it
        self.start, self.stop = self.link.start, self.link.stop

    @property
    def name(self) -> str:
        """Of this client, for the actor."""
        return self._id

    @property
    def router_away(self) -> bool:
        """The actor did not answer the last call; placements are made by own load."""
        return self.link.away

    @property
    def leases(self) -> int:
        """Requests of this process that hold a decode worker now."""
        return sum(p.state is State.LEASED for p in self.placements.values())

    async def call(self, method: str, *args: Any) -> Any:
        """Call any other method of the actor (see RouterLink.call).

        An actor that has started again knows no shape of signatures, and is told it before it takes a table.
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
        """Lease a decode worker. Never fails because routing could not decide.

        Args:
            request: without signature, similarity and may_wait, which are filled in here.
            counts: unsigned[L,E], the prompt's expert counts; None if prefill gave none. A prediction stands
                in for them, where there is a predictor.
            token_ids: uint32[n], the prompt's, where they are known.
            wait_s: how long the request may wait in the decode queue, s; 0: it is placed at once.

        Raises:
            Overloaded: no decode replica is known at all, or none was free in time.
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
                if rescore > _RESCORES:  # swapped faster than we could score: load alone decides
                    placement.request = replace(placement.request, signature=None)
                answer = self._answers[request.request_id] = asyncio.get_running_loop().create_future()
                self._ask(placement)
                # No wait_for here: in Python 3.11 it swallows a cancellation that meets a finished answer,
                # and the request of a client that has gone would run on.
                await answer
            if placement.state is not State.LEASED:
                placement.request = replace(placement.request, signature=counts)
                self._lease_by_own_load(placement)
        except BaseException:
            # It may wait in the decode queue, or hold a lease by now, or an answer with one is on its way.
            self.release(request.request_id)
            raise
        if true is not None and token_ids is not None:
            self._learn(token_ids, true, len(token_ids))
        return placement

    def counted(
        self, request_id: str, token_ids: NDArray[np.uint32], counts: NDArray[Any], prompt_tokens: int
    ) -> None:
        """The engine that the request was placed on has counted its prompt.

        Args:
            token_ids: uint32[n] that it was predicted from.
            counts: unsigned[L,E].
            prompt_tokens: that were counted; a chat's template has some beyond `token_ids`.
        """
        self._learn(token_ids, counts, prompt_tokens)
        placement = self.placements.get(request_id)
        if placement is not None and placement.state is State.LEASED:
            placement.request = replace(
                placement.request,
                signature=self._sampled(counts),
                prompt_tokens=prompt_tokens,
                predicted=False,
            )
            self._own.take(placement)
            self._counted.add(request_id)
            self.link.wake_soon()

    def progress(self, request_id: str, generated_tokens: int) -> None:
        """Tell how many tokens the request has generated so far; sent now and then."""
        placement = self.placements.get(request_id)
        if placement is not None:
            placement.generated_tokens = self._progress[request_id] = generated_tokens
            self._own.progress(request_id, generated_tokens)

    def release(self, request_id: str) -> None:
        """The request no longer runs on its worker, nor waits for one; calling it again does nothing.

        What it generated in all is still told, before the release: policies learn lengths from it.
        """
        placement = self.placements.pop(request_id, None)
        if placement is not None:
            placement.become(State.DONE)
            self._own.release(request_id)
            self._held.discard(request_id)
            self._counted.discard(request_id)
            answer = self._answers.pop(request_id, None)
            if answer is not None:
                answer.cancel()  # nobody waits for what has ended
            self._withdraw(request_id)

    def count(self, event: str) -> None:
        """Add one to a counter that `/eldr/status` shows."""
        self._events[event] += 1

    def answered_client(self, answered: Answered) -> None:
        """A stream has ended; the live page shows how fast it was."""
        self._finished.append(answered)

    # -- how -------------------------------------------------------------------------------------

    def _ask(self, placement: Placement) -> None:
        """It goes with the next call."""
        if placement.state is not State.SCORED:
            placement.become(State.SCORED)
        self._unsent[placement.request_id] = placement
        self.link.wake()

    def _settle(self, placement: Placement) -> None:
        """Whoever waits for an answer about it goes on."""
        answer = self._answers.pop(placement.request_id, None)
        if answer is not None and not answer.done():
            answer.set_result(None)

    def _lease_by_own_load(self, placement: Placement) -> None:
        self._own.lease(placement, "router-away" if self.router_away else "no-worker")
        self.count("placed_by_own_load")
        self._keep(placement)
        self._hold(placement.request_id)

    def _keep(self, placement: Placement) -> None:
        """LEASED: of the signature only what the live policy reads is kept, for the actor after this one."""
        placement.request = replace(
            placement.request, similarity=None, signature=self._read_by_policy(placement.request.signature)
        )

    def _learn(self, token_ids: NDArray[np.uint32], counts: NDArray[Any], prompt_tokens: int) -> None:
        if self.predictor is None or not prompt_tokens:
            return
        try:
            self.predictor.observe(token_ids, counts * (len(token_ids) / prompt_tokens))
        except ValueError as error:
            logger.error("the signature predictor is of no use here, nothing is predicted: %s", error)
            self.predictor = None

    def _read_by_policy(self, counts: NDArray[Any] | None) -> NDArray[Any] | None:
        """The same counts, which travel with every placement; None where nobody reads."""
        settings = self.link.settings
        if counts is None or settings is None or not settings.read_counts:
            return None
        return _packed(counts)

    def _sampled(self, counts: NDArray[Any]) -> NDArray[Any] | None:
        """Of a true signature, what the actor is told."""
        sampled = next(self._scorings) % _SAMPLED == 0
        return _packed(counts) if sampled else self._read_by_policy(counts)

    def _scored(self, request: PlacementRequest) -> PlacementRequest:
        counts, settings = request.signature, self.link.settings
        if counts is None:
            return replace(request, signature_missing=True)
        read = self._read_by_policy if request.predicted else self._sampled
        request = replace(request, signature=read(counts))
        if self._table is None or settings is None:
            return request
        try:
            similarity = self._table.similarity(counts)
        except ValueError as error:
            logger.warning("signature not usable with the live table: %s", error)
            return replace(request, signature_missing=True)
        return replace(request, similarity=similarity, table_version=settings.table_version)

    def _queue(self, placement: Placement) -> None:
        """Let it wait in the decode queue until `since_s`; refuse it at once if it would wait longer."""
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
            words = "no decode worker is free for this request in time"
            answer.set_exception(Overloaded(words, retry_after_s=retry_after_s))

    def _hold(self, request_id: str) -> None:
        """The actor is told where the request runs."""
        self._held.add(request_id)
        self.link.wake()

    def _withdraw(self, request_id: str) -> None:
        self._released.append(request_id)
        self.link.wake_soon()

    # -- what the link asks and tells (see router_link.Desk) -----------------------------------------

    def message(self, epoch: str) -> Exchange:
        sent = [placement for placement in self._unsent.values() if placement.state is State.SCORED]
        for placement in sent:
            placement.become(State.SENT)
        message = Exchange(
            self._id,
            tuple(self._scored(placement.request) for placement in sent),
            tuple(self._released),
            self._progress,
            tuple(self.placements[request_id] for request_id in self._held),
            # Its blocks were told when it was placed.
            tuple(replace(self.placements[request_id].request, blocks=None) for request_id in self._counted),
            epoch,
            dict(self._events),
            tuple(self._finished),
            None if self.predictor is None else self.predictor.status,
        )
        self._unsent, self._released, self._progress, self._held = {}, [], {}, set()
        self._counted = set()
        self._events = Counter()
        self._finished.clear()
        return message

    def undelivered(self, message: Exchange) -> None:
        for request in message.placements:
            placement = self.placements.get(request.request_id)
            if placement is not None and placement.state is State.SENT:
                self._ask(placement)
        self._counted |= {request.request_id for request in message.counted} & self.placements.keys()
        self._events.update(message.events)
        self._finished = deque([*message.answered, *self._finished], maxlen=_MOST_ANSWERED)

    def answered(self, placements: tuple[Placement, ...]) -> None:
        for answer in placements:
            own = self.placements.get(answer.request_id)
            if own is None:
                continue  # given up since, of which the actor is told
            if own.state is State.LEASED:
                if answer.state is State.LEASED and answer.replica != own.replica:
                    self._hold(answer.request_id)
            elif answer.state is State.LEASED:
                own.become(State.LEASED)
                own.replica, own.slot, own.band = answer.replica, answer.slot, answer.band
                own.similarity, own.best = answer.similarity, answer.best
                own.reason, own.policy, own.waited_s = answer.reason, answer.policy, answer.waited_s
                self._keep(own)
                self._own.take(own)
                self._settle(own)
            elif own.state is State.SENT and answer.state is State.QUEUED:
                self._queue(own)
            elif own.state is State.SENT:
                self._settle(own)  # it is scored and sent again

    def snapshot(self) -> tuple[Placement, ...]:
        self._released, self._progress, self._held = [], {}, set()
        return tuple(p for p in self.placements.values() if p.state is State.LEASED)

    def lost(self) -> None:
        for request_id in list(self._answers):
            self._settle(self.placements[request_id])

    def settings_changed(self, settings: Settings) -> None:
        if settings.table != self._table_file:
            self._table = RoutingTable.from_bytes(settings.table) if settings.table is not None else None
            self._table_file = settings.table
        if settings.predictor != self._predictor_file:
            self._predictor_file = settings.predictor
            self.predictor = self._made(settings.predictor)
            if self.predictor is not None:
                self.on_predictor()
        for placement in list(self._queued()):
            self._ask(placement)

    def _made(self, predictor: bytes | None) -> OnlinePredictor | None:
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
        """The served tokenizer is this one; a predictor of another is given up."""
        self.tokenizer = fingerprint
        if self.predictor is not None and self.predictor.predictor.tokenizer != fingerprint:
            self.predictor = self._made(self._predictor_file)

    @property
    def has_news(self) -> bool:
        return bool(self._released or self._progress or self._events or self._finished or self._counted)

    @property
    def waits(self) -> bool:
        return any(self._queued())

    def _queued(self) -> Iterator[Placement]:
        found = (self.placements[request_id] for request_id in self._answers)
        return (placement for placement in found if placement.state is State.QUEUED)


def _packed(counts: NDArray[Any]) -> NDArray[Any]:
    """The same in the fewest bytes."""
    return counts.astype(np.min_scalar_type(counts.max(initial=0).item()))
