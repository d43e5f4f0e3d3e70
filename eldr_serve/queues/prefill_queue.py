"""Queues of prompts that wait for prefill in engines, with predicted waiting times.

An engine computes prompts in order of arrival. Each ingress knows its own prompts. Each replica measures its
throughput in tokens/s and reports it to the ingresses, with the number of tokens in its queue.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from eldr_serve.queues.retry_times import MAX_RETRY_AFTER_S, RetryTimes
from eldr_serve.queues.turns import Turn, Turns

QUEUE = "eldr_prefill_queue"  # field of a replica's report, see Meter.report
DEFAULT_RATE = 1000.0  # assumed throughput until it has been measured, tokens/s
_IDLE_BELOW_TOKENS = 512  # with fewer queued tokens an engine counts as idle, and its rate is not measured
_WINDOW_S = 30.0  # averaging window for the rate, s of busy time
_PRIOR_S = 0.1  # weight of the default rate, s of busy time
_STALE_S = 10.0  # a report older than this is ignored
_RETRY_ROOM = 0.8  # retries are scheduled for when the queue is down to this share of the bound
_OVERDRAFT = 1.25  # a retry that comes at its promised time may exceed the bound by this factor
_TRUST_S, _TRUST_FACTOR = 30.0, 20.0  # a rate measured over t s is trusted for the next 30 + 20 t s
_CHARACTERS_PER_TOKEN = 4.0  # initial estimate, updated from prompts


class Throughput:
    """Measures the throughput of an engine in tokens/s while it is busy.

    Args:
        clock: returns the time, s.

    Attributes:
        outstanding: number of tokens that have entered and not left.
    """

    def __init__(self, *, clock: Callable[[], float]) -> None:
        self.outstanding = 0.0
        self._clock = clock
        self._at_s = clock()
        self._tokens = self._seconds = 0.0

    @property
    def measured_s(self) -> float:
        """Return the busy time over which the rate was measured, at most about 30 s."""
        return self._seconds

    @property
    def rate(self) -> float | None:
        """Return the throughput, tokens/s; None until a busy engine has computed a prompt."""
        if not self._tokens:
            return None
        return (self._tokens + _PRIOR_S * DEFAULT_RATE) / (self._seconds + _PRIOR_S)

    def enter(self, tokens: float) -> None:
        """Count a prompt that has arrived."""
        self._advance()
        self.outstanding += tokens

    def leave(self, tokens: float, computed: float) -> None:
        """Count a prompt that has left.

        Args:
            tokens: the same number as for `enter`.
            computed: number of tokens that the engine has computed; 0 if the prompt was not computed.
        """
        if self._advance():
            self._tokens += computed
        self.outstanding = max(0.0, self.outstanding - tokens)

    def _advance(self) -> bool:
        """Account for the time since the last event; return whether the engine was busy."""
        now = self._clock()
        passed_s, self._at_s = now - self._at_s, now
        if self.outstanding < _IDLE_BELOW_TOKENS:
            return False
        kept = math.exp(-passed_s / _WINDOW_S)
        self._tokens *= kept
        self._seconds = self._seconds * kept + passed_s
        return True


class Meter(Throughput):
    """Measures, in a replica, the prompts that all ingresses have sent to it."""

    def report(self, number: int, *, callers: int, calls: int) -> dict[str, float]:
        """Return this replica's report of its queue; see Report."""
        rate, tokens = self.rate or 0.0, self.outstanding
        return {"number": number, "tokens": tokens, "rate": rate, "callers": callers, "calls": calls}


@dataclass(frozen=True)
class Report:
    """A replica's measurements of its queue.

    Attributes:
        number: sequence number of the report.
        tokens: number of tokens of all ingresses' prompts that the replica has not computed yet.
        rate: throughput, tokens/s; 0 if not known yet.
        callers: number of ingresses that have a channel to the replica.
        calls: number of open calls of all ingresses.
    """

    number: int = -1
    tokens: float = 0.0
    rate: float = 0.0
    callers: int = 1
    calls: int = 0

    @classmethod
    def of(cls, found: Mapping[str, Any]) -> Report:
        """Parse a replica's report. Ignore unknown fields, which a replica of another version may send."""
        return cls(**{name: found[name] for name in cls.__dataclass_fields__ if name in found})


class PromptSizes:
    """Estimates the number of tokens of a prompt before it is tokenised."""

    def __init__(self) -> None:
        self._characters, self._tokens = 1000 * _CHARACTERS_PER_TOKEN, 1000.0

    def estimate(self, prompt: Any, messages: Any) -> float:
        """Estimate the number of tokens of a completion's prompt or a chat's messages; at least 1."""
        if isinstance(prompt, list) and prompt and isinstance(prompt[0], int):
            return float(len(prompt))
        characters = _characters(prompt if messages is None else messages)
        return max(1.0, characters * self._tokens / self._characters)

    def learn(self, estimated: float, computed: int) -> None:
        """Update the estimator with the true number of tokens of an estimated prompt."""
        characters = estimated * self._characters / self._tokens
        self._characters = 0.99 * self._characters + characters
        self._tokens = 0.99 * self._tokens + computed


def _characters(value: Any) -> int:
    """Return the total length of all strings in a nested value."""
    pending, total = [value], 0
    while pending:
        found = pending.pop()
        if isinstance(found, str):
            total += len(found)
        elif isinstance(found, list):
            pending += found
        elif isinstance(found, dict):
            pending += [found[key] for key in ("content", "text") if key in found]
    return total


@dataclass(eq=False)
class Ticket:
    """One prompt in the queue of a replica, or on its way there.

    Attributes:
        turn: see Turns; None until a replica has been chosen.
    """

    tokens: float
    turn: Turn | None = None
    gone: bool = False


@dataclass(eq=False)
class _Queue:
    """The queue of one replica, as far as this ingress knows it."""

    own: Throughput
    report: Report = field(default_factory=Report)
    reported_s: float = -math.inf
    own_then: float = 0.0  # own tokens when the last report arrived
    own_before: float = 0.0  # own tokens when the report before it arrived
    others: float = 0.0  # tokens of other ingresses

    @property
    def rate(self) -> float | None:
        return self.report.rate or self.own.rate

    @property
    def known_rate(self) -> float:
        return self.rate or DEFAULT_RATE

    @property
    def tokens(self) -> float:
        return self.own.outstanding + self.others

    def takes(self, more: float, bound_s: float) -> bool:
        """Return whether a prompt may join the queue.

        Ingresses learn of each other's prompts once per second. Between two reports each ingress uses only
        its share of the free room, so that together they do not exceed the bound. A report may not include
        the newest prompts of this ingress, so tokens are counted since the last two reports.
        """
        token_limit = bound_s * self.known_rate
        if self.tokens + more > token_limit:
            return not self.tokens + more  # an idle replica accepts any prompt
        if self.report.callers <= 1:
            return True
        free = max(0.0, token_limit - self.own_then - self.others)
        return self.own.outstanding - min(self.own_then, self.own_before) <= free / self.report.callers


class PrefillQueues:
    """The queues of all replicas that prefill, as far as one ingress knows them.

    Args:
        bound_s: maximum predicted wait, s; a prompt that would wait longer is refused.
        reports: returns the newest report of each replica, if there is one, see Report.
        clock: returns the time, s.
    """

    def __init__(
        self,
        bound_s: float,
        *,
        reports: Callable[[], Mapping[str, Mapping[str, Any]]] = dict,
        clock: Callable[[], float],
    ) -> None:
        self._bound_s = bound_s
        self._reports = reports
        self._clock = clock
        self._queues: dict[str, _Queue] = {}
        self._retries = RetryTimes(clock=clock)
        self._turns = Turns(clock=clock)
        self._unplaced = 0.0  # tokens of prompts for which no replica has been chosen yet
        self.sizes = PromptSizes()

    # -- predictions -------------------------------------------------------------------------------

    @property
    def outstanding(self) -> int:
        """Return the number of tokens of this ingress that all replicas have yet to compute."""
        return round(self._unplaced + sum(queue.own.outstanding for queue in self._queues.values()))

    def is_measured(self, replicas: Iterable[str]) -> bool:
        """Return whether the rate of any of these replicas is known."""
        return any(self._queue(name).rate for name in replicas)

    def wait_s(self, replica: str) -> float:
        """Predict how long a prompt that arrives now would wait for its prefill, s."""
        queue = self._queue(replica)
        return queue.tokens / queue.known_rate

    def left_s(self, ticket: Ticket | None) -> float:
        """Predict the time until a prompt has been computed, s; 0 without a ticket."""
        return 0.0 if ticket is None or ticket.turn is None else ticket.turn.since_s - self._clock()

    def _queue(self, replica: str) -> _Queue:
        queue = self._queues.get(replica)
        if queue is None:
            queue = self._queues[replica] = _Queue(Throughput(clock=self._clock))
        found, now = self._reports().get(replica), self._clock()
        if found is not None and found["number"] != queue.report.number:
            queue.report, queue.reported_s = Report.of(found), now
            queue.own_before, queue.own_then = queue.own_then, queue.own.outstanding
            queue.others = max(0.0, queue.report.tokens - queue.own_then)
        elif now - queue.reported_s > _STALE_S:
            queue.others = 0.0
        if queue.report.callers <= 1:
            queue.others = 0.0
        return queue

    # -- admission ---------------------------------------------------------------------------------

    def with_room(self, replicas: Sequence[str], key: Hashable) -> list[str]:
        """Return those of `replicas` whose predicted wait is within the bound.

        Args:
            key: identifies the request, to recognise the retry of a refused request.
        """
        returns = self._retries.is_due(key)
        held = self._unplaced + (0.0 if returns else self._retries.due_tokens)
        bound_s = self._bound_s * (_OVERDRAFT if returns else 1.0)
        return [name for name in replicas if self._queue(name).takes(held / len(replicas), bound_s)]

    def retry_s(self, replicas: Iterable[str], tokens: float, key: Hashable) -> int:
        """Reserve room for a request that is refused now; return after how many seconds it may retry.

        The prompts that other ingresses have accepted since the last report are unknown, so each is assumed
        to have as many tokens as this one. A rate that was measured for a short time cannot predict minutes:
        if the retry time would be later than the rate is trusted, the client is asked to retry earlier.
        """
        queues = [self._queue(name) for name in replicas]
        rate = sum(queue.known_rate for queue in queues) or DEFAULT_RATE
        callers = max((queue.report.callers for queue in queues), default=1)
        own = self._unplaced + sum(queue.own.outstanding for queue in queues)
        known = self._unplaced + sum(queue.tokens for queue in queues)
        waiting = max(known, min(callers * own, self._bound_s * rate))
        ahead = max(0.0, waiting - _RETRY_ROOM * self._bound_s * rate)
        after_s = (ahead + callers * (self._retries.tokens + tokens)) / rate
        measured_s = max((queue.own.measured_s for queue in queues), default=0.0)
        max_s = min(MAX_RETRY_AFTER_S, _TRUST_S + _TRUST_FACTOR * measured_s)
        return max(1, math.ceil(self._retries.reserve(key, tokens, after_s, max_s)))

    def enter(self, replica: str | None, tokens: float, key: Hashable) -> Ticket:
        """Count an accepted prompt. The replica may be None until `assign` is called."""
        self._retries.claim(key)
        ticket = Ticket(tokens)
        if replica is None:
            self._unplaced += tokens
        else:
            self._begin(ticket, replica)
        return ticket

    def assign(self, ticket: Ticket, replica: str) -> None:
        """Add a prompt that had no replica to the queue of this one."""
        self._unplaced -= ticket.tokens
        self._begin(ticket, replica)

    def _begin(self, ticket: Ticket, replica: str) -> None:
        queue = self._queue(replica)
        expected_s = (queue.tokens + ticket.tokens) / queue.known_rate
        queue.own.enter(ticket.tokens)
        ticket.turn = self._turns.enter(replica, expected_s)

    def leave(self, ticket: Ticket, computed: int | None = None) -> None:
        """Remove a prompt from its queue. Further calls have no effect.

        Args:
            computed: number of tokens of the prompt; None if it was not computed.
        """
        if ticket.gone:
            return
        ticket.gone = True
        if ticket.turn is None:
            self._unplaced -= ticket.tokens
            return
        self._turns.leave(ticket.turn, answered=computed is not None)
        self._queue(ticket.turn.replica).own.leave(ticket.tokens, computed or 0)
        if computed:
            self.sizes.learn(ticket.tokens, computed)

    def keep(self, replicas: Iterable[str]) -> None:
        """Discard the queues of other replicas, once they are empty."""
        names = set(replicas)
        self._queues = {n: q for n, q in self._queues.items() if n in names or q.own.outstanding}
