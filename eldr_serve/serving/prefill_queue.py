"""The prompts that wait in engines for their prefill, in predicted seconds.

An engine computes prompts first come first. Each ingress knows its own prompts; each replica measures how
many tokens a second it computes and tells the ingresses so, with how many tokens it has in all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from eldr_serve.serving.retry_times import MOST_S, RetryTimes
from eldr_serve.serving.turns import Turn, Turns

QUEUE = "eldr_prefill_queue"  # in a replica's report, see Meter.report
DEFAULT_RATE = 1000.0  # tokens/s of a replica that nobody has measured yet
_BUSY_TOKENS = 512  # fewer do not fill an engine, and show nothing of its rate
_WINDOW_S = 30.0  # of busy time, over which the rate is averaged
_PRIOR_S = 0.1  # weight of the default rate
_STALE_S = 10.0  # a report without a successor for longer is not believed
_RETRY_ROOM = 0.8  # of the bound; retries come when no more is taken, since predictions may be off
_OVERDRAFT = 1.25  # of the bound, for a request that comes again when it was told to
_FORESEEN_S, _FORESEEN = 30.0, 20.0  # a rate measured for t seconds predicts the next 30 + 20 t
_CHARACTERS_A_TOKEN = 4.0  # until prompts have shown it


class Throughput:
    """Measures the tokens a second that an engine computes while it has enough to do.

    Args:
        clock: returns the time, s.

    Attributes:
        outstanding: tokens that have entered and not left.
    """

    def __init__(self, *, clock: Callable[[], float]) -> None:
        self.outstanding = 0.0
        self._clock = clock
        self._at_s = clock()
        self._tokens = self._seconds = 0.0

    @property
    def measured_s(self) -> float:
        """Busy time that the rate is of, at most about 30 s."""
        return self._seconds

    @property
    def rate(self) -> float | None:
        """Tokens/s; None if no prompt of a busy engine has been computed."""
        if not self._tokens:
            return None
        return (self._tokens + _PRIOR_S * DEFAULT_RATE) / (self._seconds + _PRIOR_S)

    def enter(self, tokens: float) -> None:
        """Count a prompt that has come."""
        self._advance()
        self.outstanding += tokens

    def leave(self, tokens: float, computed: float) -> None:
        """Count a prompt that has gone.

        Args:
            tokens: as it entered.
            computed: its tokens, as its engine has counted them; 0: it was not computed.
        """
        if self._advance():
            self._tokens += computed
        self.outstanding = max(0.0, self.outstanding - tokens)

    def _advance(self) -> bool:
        """Count the time since the last event; return whether the engine was busy in it."""
        now = self._clock()
        passed_s, self._at_s = now - self._at_s, now
        if self.outstanding < _BUSY_TOKENS:
            return False
        kept = math.exp(-passed_s / _WINDOW_S)
        self._tokens *= kept
        self._seconds = self._seconds * kept + passed_s
        return True


class Meter:
    """Measures the prompts of all ingresses, in the replica that computes them."""

    def __init__(self, *, clock: Callable[[], float]) -> None:
        self._throughput = Throughput(clock=clock)
        self.enter, self.leave = self._throughput.enter, self._throughput.leave

    def report(self, number: int, *, callers: int, calls: int) -> dict[str, float]:
        """Return this replica's report of its queue; see Report."""
        rate = self._throughput.rate or 0.0
        tokens = self._throughput.outstanding
        return {"number": number, "tokens": tokens, "rate": rate, "callers": callers, "calls": calls}


@dataclass(frozen=True)
class Report:
    """What a replica has measured.

    Attributes:
        number: of this report; the same number again is no news.
        tokens: of prompts that it has and has not computed, over all ingresses.
        rate: tokens/s; 0: not known yet.
        callers: ingresses that have a channel to it.
        calls: open calls of all ingresses.
    """

    number: int = -1
    tokens: float = 0.0
    rate: float = 0.0
    callers: int = 1
    calls: int = 0

    @classmethod
    def of(cls, found: Mapping[str, Any]) -> Report:
        """Read a replica's report; a replica with other code may send other fields."""
        return cls(**{name: found[name] for name in cls.__dataclass_fields__ if name in found})


class PromptSizes:
    """Estimates how many tokens a prompt has before it is tokenised."""

    def __init__(self) -> None:
        self._characters, self._tokens = 1000 * _CHARACTERS_A_TOKEN, 1000.0

    def estimate(self, prompt: Any, messages: Any) -> float:
        """Return the tokens of a completion's prompt or of a chat's messages; at least 1."""
        if isinstance(prompt, list) and prompt and isinstance(prompt[0], int):
            return float(len(prompt))
        characters = _characters(prompt if messages is None else messages)
        return max(1.0, characters * self._tokens / self._characters)

    def learn(self, estimated: float, computed: int) -> None:
        """Take the number of tokens that an estimate has turned out to be."""
        characters = estimated * self._characters / self._tokens
        self._characters = 0.99 * self._characters + characters
        self._tokens = 0.99 * self._tokens + computed


def _characters(value: Any) -> int:
    """Return the length of all texts within."""
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
    """One prompt on its way to a replica, or in it.

    Attributes:
        turn: see Turns; None: no replica has been chosen for it.
    """

    tokens: float
    turn: Turn | None = None
    gone: bool = False


@dataclass(eq=False)
class _Queue:
    """The queue of one replica, as this ingress knows it."""

    own: Throughput
    report: Report = field(default_factory=Report)
    reported_s: float = -math.inf
    own_then: float = 0.0  # own tokens when the report came
    own_before: float = 0.0  # the same of the report before it
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

        Ingresses hear of each other's prompts once a second. Until then each takes its share of what was
        free, so that together they do not go beyond the bound. A report may be older than the newest
        prompts of this ingress, so the share is of two reports.
        """
        most = bound_s * self.known_rate
        if self.tokens + more > most:
            return not self.tokens + more  # then it is idle
        if self.report.callers <= 1:
            return True
        free = max(0.0, most - self.own_then - self.others)
        return self.own.outstanding - min(self.own_then, self.own_before) <= free / self.report.callers


class PrefillQueues:
    """The queues of all replicas that prefill, as one ingress knows them.

    Args:
        bound_s: a prompt that would wait for longer is refused, s.
        reports: returns the newest report of each replica that has sent one, see Report.
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
        self._unplaced = 0.0  # tokens of prompts whose replica is not chosen yet
        self.sizes = PromptSizes()

    # -- what is known -----------------------------------------------------------------------------

    @property
    def outstanding(self) -> int:
        """Tokens of this ingress that replicas have not computed, over all of them."""
        return round(self._unplaced + sum(queue.own.outstanding for queue in self._queues.values()))

    def is_measured(self, replicas: Iterable[str]) -> bool:
        """Return whether the rate of some of them is known."""
        return any(self._queue(name).rate for name in replicas)

    def wait_s(self, replica: str) -> float:
        """Predict how long a prompt that comes now would wait for its prefill, s."""
        queue = self._queue(replica)
        return queue.tokens / queue.known_rate

    def left_s(self, ticket: Ticket | None) -> float:
        """Return the predicted time until a prompt is computed, s; 0 without a ticket."""
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

    def with_room(self, replicas: Sequence[str], key: int) -> list[str]:
        """Return those of `replicas` whose predicted wait is within the bound.

        Args:
            key: names the request, so that one that was refused before and comes again is known.
        """
        returns = self._retries.is_due(key)
        held = self._unplaced + (0.0 if returns else self._retries.due_tokens)
        bound_s = self._bound_s * (_OVERDRAFT if returns else 1.0)
        return [name for name in replicas if self._queue(name).takes(held / len(replicas), bound_s)]

    def retry_s(self, replicas: Iterable[str], tokens: float, key: int) -> int:
        """Reserve room for a request that is refused now, and return in how many seconds it is there.

        What other ingresses have taken since the last report is not known; until it is, they are taken to
        have as much as this one. A rate that was measured for a moment promises nothing for minutes: who
        would come so late is told to ask again sooner.
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
        most_s = min(MOST_S, _FORESEEN_S + _FORESEEN * measured_s)
        return max(1, math.ceil(self._retries.reserve(key, tokens, after_s, most_s)))

    def enter(self, replica: str | None, tokens: float, key: int) -> Ticket:
        """Count a prompt that is taken; without a replica until `place` says which."""
        self._retries.claim(key)
        ticket = Ticket(tokens)
        if replica is None:
            self._unplaced += tokens
        else:
            self._begin(ticket, replica)
        return ticket

    def place(self, ticket: Ticket, replica: str) -> None:
        """Count a prompt in the queue of its replica."""
        self._unplaced -= ticket.tokens
        self._begin(ticket, replica)

    def _begin(self, ticket: Ticket, replica: str) -> None:
        queue = self._queue(replica)
        expected_s = (queue.tokens + ticket.tokens) / queue.known_rate
        queue.own.enter(ticket.tokens)
        ticket.turn = self._turns.enter(replica, expected_s)

    def leave(self, ticket: Ticket, computed: int | None = None) -> None:
        """Count a prompt that has gone; again: nothing happens.

        Args:
            computed: its tokens, if it was computed; None: it was not.
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
        """Forget the replicas that are not among these and have nothing left to answer."""
        names = set(replicas)
        self._queues = {n: q for n, q in self._queues.items() if n in names or q.own.outstanding}
