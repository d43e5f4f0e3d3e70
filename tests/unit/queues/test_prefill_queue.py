"""Prefill queues, against a simulated server that computes prompts in order of arrival."""

import heapq
import itertools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from eldr_serve.queues.call_start import CallStartEstimator
from eldr_serve.queues.prefill_queue import PrefillQueues, Ticket
from eldr_serve.queues.prefill_replica_choice import choose_prefill_replica
from eldr_serve.queues.prompt_sizes import PromptSizes
from eldr_serve.queues.reports import PromptMeter, QueueReport
from eldr_serve.queues.retry_times import MAX_RETRY_AFTER_S, RetryTimes
from eldr_serve.queues.throughput import DEFAULT_RATE, Throughput
from tests.support.clock import Clock

BOUND_S = 30.0
QUICK = (Phase.explicit, Phase.generate)  # shrinking a failing load takes minutes


@dataclass
class Server:
    """A server that computes prompts one after the other, and reports its queue once per second."""

    clock: Clock
    rate: float
    ingresses: int = 1
    names: Any = field(default_factory=itertools.count)
    waiting: list[tuple[float, int, Callable[[float], None]]] = field(default_factory=list)
    left_s: float = 0.0  # remaining time of the current prompt
    idle_s: float = 0.0

    def __post_init__(self) -> None:
        self.meter = PromptMeter(clock=self.clock)
        self.reports: dict[str, QueueReport] = {}
        self.next_report_s = 0.0

    def add(self, tokens: int, done: Callable[[float], None]) -> None:
        """Add a prompt. `done` is called with the time when its computation began."""
        if not self.waiting:
            self.left_s = tokens / self.rate
        self.waiting.append((tokens, tokens, done))
        self.meter.enter(tokens)

    @property
    def tokens(self) -> float:
        return sum(tokens for tokens, _, _ in self.waiting)

    def run(self, until_s: float) -> None:
        """Compute until this time."""
        while True:
            ends_s = self.clock.now + self.left_s if self.waiting else float("inf")
            at_s = min(until_s, ends_s, self.next_report_s)
            if self.waiting:
                self.left_s -= at_s - self.clock.now
            else:
                self.idle_s += at_s - self.clock.now
            self.clock.now = at_s
            if at_s == ends_s:
                tokens, _, done = self.waiting.pop(0)
                self.meter.leave(tokens, tokens)
                start_s = at_s - tokens / self.rate
                self.left_s = self.waiting[0][0] / self.rate if self.waiting else 0.0
                done(start_s)
            elif at_s == self.next_report_s:
                self.reports["p"] = self.meter.report(
                    next(self.names), num_ingresses=self.ingresses, calls=len(self.waiting)
                )
                self.next_report_s += 1.0
            else:
                return


@dataclass
class Ingress:
    """An ingress that sends prompts to the server while its queue has room."""

    server: Server

    def __post_init__(self) -> None:
        self.queues = PrefillQueues(BOUND_S, reports=lambda: self.server.reports, clock=self.server.clock)
        self.refused = 0

    def send(self, tokens: int, key: int, began: Callable[[float], None] = lambda at_s: None) -> int | None:
        """Send a prompt, and return the seconds until a retry, or None if it was accepted."""
        if not self.queues.workers_with_room(["p"], key):
            self.refused += 1
            return self.queues.retry_s(["p"], tokens, key)
        ticket = self.queues.enter("p", tokens, key)

        def finish(at_s: float) -> None:
            began(at_s)
            self.queues.leave(ticket, tokens)

        self.server.add(tokens, finish)
        return None


LOADS = st.lists(st.tuples(st.integers(1, 4000), st.floats(0.0, 3.0)), min_size=20, max_size=120)


@settings(max_examples=10, phases=QUICK)
@given(st.floats(500, 50_000), LOADS)
def test_predicted_waits_are_accurate(rate: float, load: list[tuple[int, float]]) -> None:
    clock = Clock()
    server = Server(clock, rate)
    ingress = Ingress(server)
    for _ in range(5):  # then the rate is measured for so long that the assumed one has little weight
        for key in range(30):
            ingress.send(2000, key)
        server.run(clock.now + 60_000 / rate + 2.0)
    errors = []
    for key, (tokens, gap_s) in enumerate(load):
        server.run(clock.now + gap_s * 2000 / rate)
        predicted_s, sent_s = ingress.queues.estimate_wait_s("p"), clock.now

        def began(at_s: float, sent_s: float = sent_s, predicted_s: float = predicted_s) -> None:
            errors.append((predicted_s - (at_s - sent_s), at_s - sent_s))

        ingress.send(tokens, key, began)
    server.run(clock.now + 200.0)
    assert errors
    # The prompt in progress counts in full; the rate is measured within 10 %.
    assert all(-0.1 * wait_s - 1e-6 <= error_s <= 0.1 * wait_s + 4400 / rate for error_s, wait_s in errors)


@settings(max_examples=8, phases=QUICK)
@given(st.floats(2000, 50_000), st.integers(1, 5), st.integers(100, 4000), st.randoms())
def test_the_queue_is_bounded_with_several_ingresses(
    rate: float, ingresses: int, tokens: int, rng: Any
) -> None:
    clock = Clock()
    server = Server(clock, rate, ingresses)
    senders = [Ingress(server) for _ in range(ingresses)]
    keys = itertools.count()
    for _ in range(20):
        senders[0].send(tokens, next(keys))
    server.run(clock.now + 20 * tokens / rate + 2.0)
    most = 0.0
    for _ in range(600):  # far more than the server can compute, at random ingresses
        server.run(clock.now + 0.5 * rng.random() * tokens / rate)
        rng.choice(senders).send(tokens, next(keys))
        most = max(most, server.tokens / rate)
    burst = int(2 * BOUND_S * rate / tokens)
    for _ in range(burst):
        rng.choice(senders).send(tokens, next(keys))
    assert max(most, server.tokens / rate) <= 1.15 * BOUND_S + ingresses * tokens / rate


@settings(max_examples=8, phases=QUICK)
@given(st.floats(2000, 50_000), st.floats(0.2, 1.0), st.integers(1, 4), st.integers(1, 3))
def test_refused_prompts_are_accepted_at_their_retry_times(
    rate: float, prompt_s: float, excess: int, ingresses: int
) -> None:
    """The server never idles before the last one."""
    clock = Clock()
    server = Server(clock, rate, ingresses)
    senders = [Ingress(server) for _ in range(ingresses)]
    tokens = int(prompt_s * rate)
    for key in range(60 * ingresses):
        senders[key % ingresses].send(tokens, -key - 1)
        server.run(clock.now + 0.8 * prompt_s)
    server.run(clock.now + 60 * prompt_s)
    count, idle_s = int((1 + excess) * BOUND_S / prompt_s), server.idle_s
    starts_s: list[float] = []
    due, tries = [(clock.now, key) for key in range(count)], Counter[int]()
    while due:
        at_s, key = heapq.heappop(due)
        server.run(at_s)
        tries[key] += 1
        after_s = senders[key % ingresses].send(tokens, key, starts_s.append)
        if after_s is not None:
            heapq.heappush(due, (clock.now + after_s, key))
    assert max(tries.values()) <= 2
    assert server.idle_s == idle_s
    server.run(clock.now + 3 * BOUND_S)
    assert len(starts_s) == count


def test_a_default_rate_bounds_the_queue_until_the_first_completion() -> None:
    clock = Clock()
    ingress = Ingress(Server(clock, rate=20_000))
    num_accepted = sum(ingress.send(1000, key) is None for key in range(100))
    assert num_accepted == BOUND_S * DEFAULT_RATE / 1000 + 1
    ingress.server.run(0.5)
    assert ingress.queues.is_measured(["p"])
    assert sum(ingress.send(1000, key) is None for key in range(1000)) > 400


def test_an_idle_replica_accepts_a_prompt_longer_than_the_bound() -> None:
    ingress = Ingress(Server(Clock(), rate=100))
    assert ingress.send(10**6, 1) is None
    assert ingress.send(1, 2) is not None


def test_idle_time_and_short_prompts_do_not_measure_the_rate() -> None:
    clock = Clock()
    throughput = Throughput(clock=clock)
    for _ in range(20):
        throughput.enter(8)
        clock.now += 0.1
        throughput.leave(8, 8)
        clock.now += 5.0
    assert throughput.rate is None
    throughput.enter(2000)
    clock.now += 1.0
    throughput.leave(2000, 2000)
    assert throughput.rate == pytest.approx(2000, rel=0.1)


def test_cancelled_prompts_do_not_count_as_computed() -> None:
    clock = Clock()
    queues = PrefillQueues(BOUND_S, clock=clock)
    first, second = queues.enter("p", 3000, 1), queues.enter("p", 3000, 2)
    clock.now = 1.0
    queues.leave(first)
    queues.leave(first)  # this has no effect
    assert queues.estimate_wait_s("p") == 3000 / DEFAULT_RATE
    queues.leave(second, 3000)
    assert queues.estimate_wait_s("p") == 0.0


def test_a_prompt_without_a_replica_counts_in_all_queues() -> None:
    queues = PrefillQueues(10.0, clock=Clock())
    tickets = []
    while queues.workers_with_room(["a", "b"], 0):
        tickets.append(queues.enter(None, 1000, 0))
    assert len(tickets) == 2 * 10 + 1
    queues.assign(tickets[0], "a")
    assert queues.estimate_wait_s("a") == 1000 / DEFAULT_RATE
    for ticket in tickets:
        queues.leave(ticket)
    assert queues.estimate_wait_s("a") == 0.0
    assert queues.workers_with_room(["a", "b"], 0) == ["a", "b"]


def test_an_overdue_prompt_has_no_time_remaining() -> None:
    queues = PrefillQueues(10.0, clock=(clock := Clock()))
    ticket = queues.enter(None, 1000, 0)
    assert queues.remaining_s(ticket) == 0.0
    queues.assign(ticket, "p")
    assert queues.remaining_s(ticket) == 1000 / DEFAULT_RATE
    clock.now = 1e6
    assert queues.remaining_s(ticket) == 0.0


def test_old_reports_expire() -> None:
    clock = Clock()
    sent = {"number": 1, "tokens": 10**6, "rate": 1000.0, "num_ingresses": 2, "calls": 9, "new": 1}
    reports = {"p": QueueReport.parse(sent)}
    queues = PrefillQueues(BOUND_S, reports=lambda: reports, clock=clock)
    assert queues.workers_with_room(["p"], 0) == []
    clock.now += 11.0
    assert queues.workers_with_room(["p"], 0) == ["p"]


@pytest.mark.parametrize(("measured_s", "longest_s"), [(0.0, 30), (5.0, 130)])
def test_a_retry_time_is_bounded_by_how_long_the_used_rate_was_measured(
    measured_s: float, longest_s: int
) -> None:
    report = QueueReport(number=1, tokens=10**6, rate=1000.0, num_ingresses=2, measured_s=measured_s)
    queues = PrefillQueues(BOUND_S, reports=lambda: {"p": report}, clock=Clock())
    assert longest_s / 2 <= queues.retry_s(["p"], 1000, 0) <= longest_s


class PrefillCluster:
    """Ingresses that choose prefill workers by the prompts' heads, and reports of the workers' calls.

    Args:
        initial_calls: calls of each ingress to each worker; they are in the first reports.
    """

    def __init__(self, initial_calls: list[list[int]]) -> None:
        self.clock = Clock()
        self.workers = [f"p{n}" for n in range(len(initial_calls[0]))]
        self.reports: dict[str, QueueReport] = {}
        self.queues = [
            PrefillQueues(1e9, reports=lambda: self.reports, clock=self.clock) for _ in initial_calls
        ]
        self.calls: list[Counter[str]] = [Counter() for _ in initial_calls]
        for ingress, numbers in enumerate(initial_calls):
            for worker, number in zip(self.workers, numbers, strict=True):
                for _ in range(number):
                    self.enter(ingress, worker)
        self.report()

    def enter(self, ingress: int, worker: str) -> Ticket:
        self.calls[ingress][worker] += 1
        return self.queues[ingress].enter(worker, 100, 0)

    def leave(self, ingress: int, ticket: Ticket) -> None:
        assert ticket.waiting_call is not None
        self.calls[ingress][ticket.waiting_call.worker] -= 1
        self.queues[ingress].leave(ticket, 100)

    def report(self) -> None:
        """Report the calls of all ingresses to all workers; each ingress processes the reports at once."""
        number, num_ingresses = self.reports["p0"].number + 1 if self.reports else 0, len(self.queues)
        for worker, calls in self.loads().items():
            self.reports[worker] = QueueReport(number=number, num_ingresses=num_ingresses, calls=calls)
        for ingress in range(num_ingresses):
            self.estimate(ingress)

    def loads(self) -> dict[str, int]:
        return {worker: sum(calls[worker] for calls in self.calls) for worker in self.workers}

    def estimate(self, ingress: int) -> dict[str, int]:
        """Return an ingress's estimate of the calls of all ingresses."""
        others = self.queues[ingress].other_calls(self.workers)
        return {worker: self.calls[ingress][worker] + others[worker] for worker in self.workers}

    def send(self, ingress: int, head: bytes) -> str:
        worker = choose_prefill_replica(head, self.estimate(ingress))
        self.enter(ingress, worker)
        return worker


CALLS = st.integers(2, 6).flatmap(
    lambda workers: st.lists(
        st.lists(st.integers(0, 12), min_size=workers, max_size=workers), min_size=2, max_size=2
    )
)


@given(CALLS, st.integers(1, 25), st.binary(max_size=8))
def test_two_ingresses_that_alternate_keep_the_bound_on_load_together(
    initial_calls: list[list[int]], rounds: int, head: bytes
) -> None:
    """A single ingress exceeds the bound only at the least loaded worker; both exceed it by one call more."""
    cluster = PrefillCluster(initial_calls)
    hashed = choose_prefill_replica(head, dict.fromkeys(cluster.workers, 0))
    chosen = [cluster.send(ingress, head) for _ in range(rounds) for ingress in (0, 1)]
    loads = cluster.loads()
    mean = sum(loads.values()) / len(loads)
    assert hashed not in chosen or loads[hashed] <= 1 + max(1 + mean, 1.25 * mean)


def test_the_free_room_of_the_hashed_worker_is_used_once() -> None:
    """If each ingress assumed that the other sends nothing, all 24 prompts would go to the idle worker."""
    head = b"head"
    hashed = int(choose_prefill_replica(head, {f"p{n}": 0 for n in range(4)})[1:])
    busy = [0 if worker == hashed else 6 for worker in range(4)]
    cluster = PrefillCluster([busy, busy])
    for _ in range(12):
        cluster.send(0, head)
        cluster.send(1, head)
    loads = cluster.loads()
    assert loads[f"p{hashed}"] <= 1.25 * sum(loads.values()) / 4 + 1


@given(CALLS, st.lists(st.tuples(st.integers(0, 1), st.binary(max_size=2)), max_size=30))
def test_with_a_report_after_each_call_ingresses_choose_as_a_single_one(
    initial_calls: list[list[int]], prompts: list[tuple[int, bytes]]
) -> None:
    cluster = PrefillCluster(initial_calls)
    for ingress, head in prompts:
        expected = choose_prefill_replica(head, cluster.loads())
        assert cluster.send(ingress, head) == expected
        cluster.report()


@given(CALLS, st.lists(st.tuples(st.integers(0, 1), st.binary(max_size=2)), max_size=30))
def test_a_single_ingress_counts_its_own_calls_alone(
    initial_calls: list[list[int]], prompts: list[tuple[int, bytes]]
) -> None:
    """A worker may report more calls, such as one that the ingress has cancelled and the engine has not."""
    cluster = PrefillCluster(initial_calls[:1])
    for worker in cluster.workers:
        cluster.reports[worker] = QueueReport(number=9, num_ingresses=1, calls=50)
    for _, head in prompts:
        expected = choose_prefill_replica(head, cluster.loads())
        assert cluster.send(0, head) == expected
        assert cluster.estimate(0) == cluster.loads()


def test_calls_that_began_and_ended_since_the_report_count_for_each_ingress() -> None:
    cluster = PrefillCluster([[2, 0], [4, 1]])
    assert cluster.estimate(0) == cluster.estimate(1) == {"p0": 6, "p1": 1}
    ticket = cluster.enter(0, "p0")
    cluster.enter(0, "p1")
    assert cluster.estimate(0) == {"p0": 8, "p1": 3}
    assert cluster.estimate(1) == {"p0": 6, "p1": 1}
    cluster.leave(0, ticket)
    assert cluster.estimate(0) == {"p0": 6, "p1": 3}
    cluster.report()
    assert cluster.estimate(0) == cluster.estimate(1) == {"p0": 6, "p1": 2}


def test_without_a_current_report_each_ingress_is_assumed_to_have_as_many_calls_as_this_one() -> None:
    cluster = PrefillCluster([[2, 0], [4, 1], [0, 0]])
    cluster.clock.now += 11.0
    assert cluster.estimate(0) == {"p0": 6, "p1": 0}
    assert cluster.estimate(1) == {"p0": 12, "p1": 3}
    del cluster.reports["p0"]  # this worker has not reported yet
    cluster.reports["p1"] = QueueReport(number=9, num_ingresses=3, calls=1)
    assert cluster.estimate(1) == {"p0": 12, "p1": 1}


def test_prompt_sizes_are_learnt_and_token_ids_are_counted() -> None:
    sizes = PromptSizes()
    assert sizes.estimate([1, 2, 3], None) == 3
    assert sizes.estimate([[1, 2, 3], [4] * 9], None) == 12
    assert sizes.estimate([[]], None) == sizes.estimate([], None) == 1
    text = "x" * 4000
    assert sizes.estimate([text, text], None) == 2000
    assert sizes.estimate(text, None) == 1000
    chat = [{"role": "user", "content": [{"type": "text", "text": text}, {"type": "image", "url": text}]}]
    assert sizes.estimate(None, chat) == 1000
    for _ in range(500):
        sizes.learn(text, None, 2000)
        sizes.learn([1, 2, 3], None, 9000)  # it has no text
    assert sizes.estimate(text, None) == pytest.approx(2000, rel=0.05)
    assert sizes.estimate([1, 2, 3], None) == 3
    assert sizes.estimate(None, {"what": 1}) == sizes.estimate("", None) == 1


TURN_STEP = st.tuples(st.sampled_from(["enter", "answer", "cancel"]), st.integers(0, 9), st.floats(0, 9))


@given(st.lists(TURN_STEP, max_size=60))
def test_a_call_is_expected_to_start_after_its_predicted_wait_and_earlier_answers(steps: list[Any]) -> None:
    clock = Clock()
    calls = CallStartEstimator(clock=clock)
    waiting: list[tuple[Any, float]] = []  # call and predicted start
    answers: dict[int, float] = {}  # times of the calls' answers
    for what, index, value in steps:
        clock.now += value
        if what == "enter":
            waiting.append((calls.enter("r", value), clock.now + value))
        elif waiting:
            call, _ = waiting.pop(index % len(waiting))
            calls.leave(call, answered=what == "answer")
            if what == "answer":
                answers[call.number] = clock.now
        for call, predicted_s in waiting:
            before = [at_s for number, at_s in answers.items() if number < call.number]
            entered = [at_s for at_s in before if at_s >= call.expected_start_at_s]
            assert call.expected_start_at_s >= predicted_s
            assert all(at_s <= call.expected_start_at_s for at_s in entered)
            assert call.expected_start_at_s == predicted_s or call.expected_start_at_s in before


def test_a_refused_request_has_reserved_room_at_its_retry_time() -> None:
    clock = Clock()
    times = RetryTimes(clock=clock)
    assert times.reserve(1, 500.0, 10.0) == 10.0
    assert times.reserve(2, 700.0, 20.0) == 20.0
    assert (times.amount, times.due_amount) == (1200.0, 0.0)
    assert not times.is_due(1)  # it is too early
    clock.now = 10.0
    assert times.is_due(1)
    assert not times.is_due(2)
    assert times.due_amount == 500.0
    times.claim(1)
    times.claim(1)
    assert (times.amount, times.due_amount) == (700.0, 0.0)


def test_a_request_that_retries_too_early_keeps_one_reservation() -> None:
    clock = Clock()
    times = RetryTimes(clock=clock)
    for now_s in (0.0, 1.0, 2.0):
        clock.now = now_s
        assert not times.is_due(1)
        times.reserve(1, 500.0, 10.0)
        assert times.amount == 500.0
    clock.now = 12.0
    times.claim(1)
    assert (times.amount, times.due_amount) == (0.0, 0.0)


def test_reservations_expire_and_are_bounded() -> None:
    clock = Clock()
    times = RetryTimes(clock=clock)
    assert MAX_RETRY_AFTER_S / 2 <= times.reserve(1, 1.0, 10 * MAX_RETRY_AFTER_S) <= MAX_RETRY_AFTER_S
    assert 5.0 <= times.reserve(1, 1.0, 20.0, max_s=10.0) <= 10.0
    assert times.amount == 0.0
    for key in range(10_000):
        times.reserve(key, 1.0, 1.0 + key / 1000)
    assert times.reserve(10_001, 1.0, 1.0) == pytest.approx(10.999)
    assert times.reserve(10_001, 1.0, 1.0, max_s=5.0) == 5.0
    assert times.amount == 10_000
    clock.now = 100.0
    assert times.amount == times.due_amount == 0.0
