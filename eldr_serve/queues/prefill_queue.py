"""Queues of prompts that wait for prefill in engines, with estimated waiting times.

An engine computes prompts in order of arrival. Since an ingress knows only its own prompts, each worker
measures its throughput in tokens/s and reports it to all ingresses, with the number of tokens in its queue.
Decision 12 (docs/decisions) gives the reasons for this estimate and its constants.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from eldr_serve.queues.call_start import CallStartEstimator, WaitingCall
from eldr_serve.queues.reports import QueueReport
from eldr_serve.queues.retry_times import MAX_RETRY_AFTER_S, RetryTimes
from eldr_serve.queues.throughput import DEFAULT_RATE, Throughput

_STALE_S = 10.0  # the prompts in a report older than this are ignored; its rate is still used
# Retries are scheduled for when the queue has shrunk to this share of the bound. What then remains queued
# keeps the engine busy if clients retry late. The rest of the bound, 6 s by default, leaves room for requests
# without a reservation.
_RETRY_ROOM = 0.8
# A retry at its promised time may exceed the bound by this factor, because the rate may have fallen to
# _RETRY_ROOM of the promised one: 30 s of prompts at 1000 tokens/s take 37.5 s at 800 tokens/s.
_RETRY_BOUND_FACTOR = 1 / _RETRY_ROOM
# A rate that was measured over t s is trusted for the next _TRUST_S + _TRUST_FACTOR t s, which limits
# Retry-After: without a measurement to the default bound, after 28.5 s of measurement to MAX_RETRY_AFTER_S.
_TRUST_S, _TRUST_FACTOR = 30.0, 20.0


@dataclass(eq=False)
class Ticket:
    """One prompt in the queue of a worker, or on its way there.

    Attributes:
        num_tokens: number of tokens that the engine computes for it, estimated.
        waiting_call: see CallStartEstimator; None until a worker has been chosen.
    """

    num_tokens: float
    waiting_call: WaitingCall | None = None
    has_left: bool = False


@dataclass(eq=False)
class _Queue:
    """The queue of one worker, as far as this ingress knows it.

    Attributes:
        own: prompts of this ingress, and the worker's throughput for them.
        report: the worker's newest report.
        reported_at_s: time of its arrival.
        own_at_report: own tokens at that time.
        own_at_previous_report: own tokens when the report before it arrived.
        other_tokens: tokens of other ingresses.
        calls_at_report: open calls of all ingresses in the report; 0 if no report is current.
        own_calls: number of prompts of this ingress.
        own_calls_at_report: their number when the report arrived; 0 if no report is current.
    """

    own: Throughput
    report: QueueReport = field(default_factory=QueueReport)
    reported_at_s: float = -math.inf
    own_at_report: float = 0.0
    own_at_previous_report: float = 0.0
    other_tokens: float = 0.0
    calls_at_report: int = 0
    own_calls: int = 0
    own_calls_at_report: int = 0

    @property
    def rate(self) -> float | None:
        return self.report.rate or self.own.rate

    @property
    def measured_s(self) -> float:
        """Return the busy time over which `rate` was measured, s."""
        return self.report.measured_s if self.report.rate else self.own.measured_s

    @property
    def rate_or_default(self) -> float:
        return self.rate or DEFAULT_RATE

    @property
    def tokens(self) -> float:
        return self.own.outstanding + self.other_tokens

    def refresh(self, report: QueueReport | None, now_s: float) -> None:
        """Process the worker's newest report; forget other ingresses' prompts if no report is current."""
        if report is not None and report.number != self.report.number:
            self.report, self.reported_at_s = report, now_s
            self.own_at_previous_report, self.own_at_report = self.own_at_report, self.own.outstanding
            self.other_tokens = max(0.0, report.tokens - self.own_at_report)
            self.calls_at_report, self.own_calls_at_report = report.calls, self.own_calls
        elif now_s - self.reported_at_s > _STALE_S:
            self.other_tokens = 0.0
            self.calls_at_report = self.own_calls_at_report = 0
        if self.report.num_ingresses <= 1:
            self.other_tokens = 0.0

    def other_calls(self, num_ingresses: int) -> int:
        """Estimate the number of open calls of the other ingresses, if there are `num_ingresses` ingresses.

        Since the report, the calls of every other ingress are assumed to have changed as much as those of
        this one. One ingress may err. But the mean of all ingresses' estimates is the worker's true load, so
        the load stays within a bound if each ingress keeps its estimate within that bound.
        """
        if num_ingresses <= 1:
            return 0
        change = self.own_calls - self.own_calls_at_report
        return max(0, self.calls_at_report - self.own_calls_at_report + (num_ingresses - 1) * change)

    def has_room(self, tokens_before: float, bound_s: float) -> bool:
        """Return whether a prompt may join the queue.

        Ingresses learn of each other's prompts only once per second. To keep within the bound together, each
        uses only its share of the free room between two reports. Since a report may not
        include the newest prompts of this ingress, tokens are counted since the last two reports.

        Args:
            tokens_before: tokens of prompts that will join before this one. The tokens of this prompt do not
                count, so that an idle worker accepts a prompt of any length.
        """
        token_limit = bound_s * self.rate_or_default
        if self.tokens + tokens_before > token_limit:
            return False
        if self.report.num_ingresses <= 1:
            return True
        free = max(0.0, token_limit - self.own_at_report - self.other_tokens)
        own_since = self.own.outstanding - min(self.own_at_report, self.own_at_previous_report)
        return own_since <= free / self.report.num_ingresses


class PrefillQueues:
    """The queues of all workers that prefill, as far as one ingress knows them.

    Attributes:
        num_unplaced: number of prompts for which no worker has been chosen yet.

    Args:
        bound_s: maximum estimated wait, s; a prompt that would wait longer is refused.
        reports: returns the newest report of each worker, if there is one.
        clock: returns the time, s.
    """

    def __init__(
        self,
        bound_s: float,
        *,
        reports: Callable[[], Mapping[str, QueueReport]] = dict,
        clock: Callable[[], float],
    ) -> None:
        self._bound_s = bound_s
        self._reports = reports
        self._clock = clock
        self._queues: dict[str, _Queue] = {}
        self._retries = RetryTimes(clock=clock)  # its amounts are numbers of tokens
        self._call_starts = CallStartEstimator(clock=clock)
        self._unplaced_tokens = 0.0  # tokens of the `num_unplaced` prompts
        self.num_unplaced = 0

    # -- estimates ---------------------------------------------------------------------------------

    @property
    def outstanding_tokens(self) -> int:
        """Return the number of tokens of this ingress that all workers have yet to compute."""
        return round(self._unplaced_tokens + sum(queue.own.outstanding for queue in self._queues.values()))

    def is_measured(self, workers: Iterable[str]) -> bool:
        """Return whether the rate of any of these workers is known."""
        return any(queue.rate for queue in self._refresh(workers))

    def estimate_wait_s(self, worker: str) -> float:
        """Estimate how long a prompt that arrives now would wait for its prefill, s."""
        (queue,) = self._refresh([worker])
        return queue.tokens / queue.rate_or_default

    def other_calls(self, workers: Sequence[str]) -> dict[str, int]:
        """Estimate how many open calls all other ingresses have at each of these prefill workers.

        A worker without a current report is assumed to have as many calls of each ingress as of this one.
        """
        queues = self._refresh(workers)
        num_ingresses = max((queue.report.num_ingresses for queue in queues), default=1)
        return {name: queue.other_calls(num_ingresses) for name, queue in zip(workers, queues, strict=True)}

    def tokens_before(self, worker: str) -> float:
        """Return the tokens before a prompt that arrives now, if all prompts without a worker join first."""
        (queue,) = self._refresh([worker])
        return queue.tokens + self._unplaced_tokens

    def unplaced_s(self, workers: Sequence[str]) -> float:
        """Return the time that these workers together need for the prompts without a worker, s."""
        return self._unplaced_tokens / self.rate(workers)

    def rate(self, workers: Iterable[str]) -> float:
        """Return the throughput of these workers together, tokens/s."""
        return sum(queue.rate_or_default for queue in self._refresh(workers)) or DEFAULT_RATE

    def remaining_s(self, ticket: Ticket) -> float:
        """Estimate the time until a prompt has been computed, s; 0 if it is overdue or has no worker."""
        if ticket.waiting_call is None:
            return 0.0
        return max(0.0, ticket.waiting_call.expected_start_at_s - self._clock())

    def _refresh(self, workers: Iterable[str]) -> list[_Queue]:
        """Process the newest reports of these workers; return their queues."""
        reports, now_s = self._reports(), self._clock()
        queues = []
        for name in workers:
            queue = self._queue(name)
            queue.refresh(reports.get(name), now_s)
            queues.append(queue)
        return queues

    def _queue(self, worker: str) -> _Queue:
        """Return the queue of a worker; a new one is empty."""
        if worker not in self._queues:
            self._queues[worker] = _Queue(Throughput(clock=self._clock))
        return self._queues[worker]

    # -- admission ---------------------------------------------------------------------------------

    def workers_with_room(self, workers: Sequence[str], key: Hashable) -> list[str]:
        """Return the workers at which the estimated wait is within the bound.

        Args:
            key: identifies the request, to recognise the retry of a refused request.
        """
        is_due = self._retries.is_due(key)
        reserved_tokens = self._unplaced_tokens + (0.0 if is_due else self._retries.due_amount)
        bound_s = self._bound_s * (_RETRY_BOUND_FACTOR if is_due else 1.0)
        queues = zip(workers, self._refresh(workers), strict=True)
        return [name for name, queue in queues if queue.has_room(reserved_tokens / len(workers), bound_s)]

    def retry_s(self, workers: Iterable[str], num_tokens: float, key: Hashable) -> int:
        """Reserve room for a request that is refused now; return after how many seconds it may retry.

        The prompts that other ingresses have accepted since the last report are unknown, so each is assumed
        to have as many tokens as this one. A rate that was measured for a short time cannot predict minutes:
        if the retry time would be later than the rate is trusted, the client is asked to retry earlier.
        """
        queues = self._refresh(workers)
        rate = sum(queue.rate_or_default for queue in queues) or DEFAULT_RATE
        num_ingresses = max((queue.report.num_ingresses for queue in queues), default=1)
        own_tokens = self._unplaced_tokens + sum(queue.own.outstanding for queue in queues)
        known_tokens = self._unplaced_tokens + sum(queue.tokens for queue in queues)
        waiting_tokens = max(known_tokens, min(num_ingresses * own_tokens, self._bound_s * rate))
        excess_tokens = max(0.0, waiting_tokens - _RETRY_ROOM * self._bound_s * rate)
        after_s = (excess_tokens + num_ingresses * (self._retries.amount + num_tokens)) / rate
        measured_s = max((queue.measured_s for queue in queues), default=0.0)
        max_s = min(MAX_RETRY_AFTER_S, _TRUST_S + _TRUST_FACTOR * measured_s)
        return max(1, math.ceil(self._retries.reserve(key, num_tokens, after_s, max_s)))

    def enter(self, worker: str | None, num_tokens: float, key: Hashable) -> Ticket:
        """Count an accepted prompt. The worker may be None until `assign` is called."""
        self._retries.claim(key)
        ticket = Ticket(num_tokens)
        if worker is None:
            self._unplaced_tokens += num_tokens
            self.num_unplaced += 1
        else:
            self._enter_queue(ticket, worker)
        return ticket

    def assign(self, ticket: Ticket, worker: str) -> None:
        """Add a prompt that had no worker to the queue of this one."""
        self._unplaced_tokens -= ticket.num_tokens
        self.num_unplaced -= 1
        self._enter_queue(ticket, worker)

    def _enter_queue(self, ticket: Ticket, worker: str) -> None:
        (queue,) = self._refresh([worker])
        expected_s = (queue.tokens + ticket.num_tokens) / queue.rate_or_default
        queue.own.enter(ticket.num_tokens)
        queue.own_calls += 1
        ticket.waiting_call = self._call_starts.enter(worker, expected_s)

    def leave(self, ticket: Ticket, computed: int | None = None) -> None:
        """Remove a prompt from its queue. Further calls have no effect.

        Args:
            computed: number of tokens of the prompt; None if it was not computed.
        """
        if ticket.has_left:
            return
        ticket.has_left = True
        if ticket.waiting_call is None:
            self._unplaced_tokens -= ticket.num_tokens
            self.num_unplaced -= 1
            return
        self._call_starts.leave(ticket.waiting_call, answered=computed is not None)
        (queue,) = self._refresh([ticket.waiting_call.worker])
        queue.own.leave(ticket.num_tokens, computed or 0)
        queue.own_calls -= 1

    def keep_only(self, workers: Iterable[str]) -> None:
        """Discard the empty queues of all workers but these."""
        names = set(workers)
        self._queues = {n: q for n, q in self._queues.items() if n in names or q.own_calls}
