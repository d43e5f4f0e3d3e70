"""Projected loads against a slow reference, while requests begin, generate, move and end."""

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from eldr_serve.scheduling.policies.balance_route.dispatch import FreeSlots, WaitingTokens
from eldr_serve.scheduling.policies.balance_route.running_requests import RunningRequests

H, WORKERS = 6, 3
NAMES = st.sampled_from([f"r{i}" for i in range(90)])


class Running(RuleBasedStateMachine):
    """Random events, compared with a reference of {worker, prompt, age, last, end, asked} per request."""

    count_down = False

    def __init__(self) -> None:
        super().__init__()
        self.running = RunningRequests(H, count_down=self.count_down)
        self.held: dict[str, dict[str, int]] = {}

    @rule(
        name=NAMES,
        worker=st.integers(0, WORKERS),
        prompt=st.integers(0, 100),
        last=st.integers(0, 20),
        age=st.integers(0, 9),
    )
    def add(self, name: str, worker: int, prompt: int, last: int, age: int) -> None:
        self.running.add(name, worker, prompt, max_new_tokens=last, key=None, age=age)
        self.held[name] = {"worker": worker, "prompt": prompt, "age": age, "end": 10**9, "asked": -1}
        self.held[name]["last"] = last or 10**9

    @rule(name=NAMES)
    def remove(self, name: str) -> None:
        ran, expected = self.running.remove(name), self.held.pop(name, None)
        assert (ran is None) == (expected is None)
        if ran is not None and expected is not None:
            assert (ran.prompt_tokens, ran.generated_tokens) == (expected["prompt"], expected["age"])

    @rule(tokens=st.dictionaries(NAMES, st.integers(0, 30), max_size=30))
    def set_generated_tokens(self, tokens: dict[str, int]) -> None:
        self.running.set_generated_tokens(tokens)
        for name in tokens.keys() & self.held.keys():
            self.held[name]["age"] = tokens[name]

    @rule(refresh=st.integers(1, 8), remaining=st.floats(0, 50))
    def refresh(self, refresh: int, remaining: float) -> None:
        rows = self.running.stale_rows(refresh)
        due = {
            name
            for name, r in self.held.items()
            if r["asked"] < 0 or r["age"] - r["asked"] >= refresh or r["age"] >= r["end"]
        }
        assert {self.running.ids[row] for row in rows} == due
        self.running.set_remaining(rows, np.full(len(rows), remaining))
        for name in due:
            r = self.held[name]
            expected = min(H, max(1, round(remaining)))
            if expected == H and not self.count_down:
                expected = 10**9
            left = min(expected, r["last"] - r["age"])
            r["asked"], r["end"] = r["age"], r["age"] + max(1, left)

    @invariant()
    def loads_are_those_of_the_definition(self) -> None:
        expected = np.zeros((WORKERS, H + 1))
        for r in self.held.values():
            remaining = min(H, max(1, r["end"] - r["age"]))
            for h in range(remaining + 1):
                if r["worker"] < WORKERS:
                    expected[r["worker"], h] += r["prompt"] + r["age"] + h
        loads, requests = self.running.project(WORKERS)
        assert loads.tolist() == expected.tolist()
        assert requests.tolist() == [
            sum(r["worker"] == w for r in self.held.values()) for w in range(WORKERS)
        ]
        assert len(self.running) == len(self.held)
        assert all((name in self.running) for name in self.held)


class RunningWithCountdown(Running):
    """The same where requests that are expected to outlast the horizon count down from it."""

    count_down = True


TestRunning = Running.TestCase
TestRunningWithCountdown = RunningWithCountdown.TestCase
for case in (TestRunning, TestRunningWithCountdown):
    case.settings = settings(max_examples=40, stateful_step_count=40)


def test_the_projection_grows_to_many_requests() -> None:
    running = RunningRequests(H)
    for i in range(300):
        running.add(str(i), i % 2, 10, max_new_tokens=99, key=None)
    loads, requests = running.project(2)
    assert loads[0].tolist() == [150 * (10 + h) for h in range(H + 1)]
    assert requests.tolist() == [150, 150]


def test_admissions_within_a_dispatch_equal_a_new_projection() -> None:
    rng = np.random.default_rng(0)
    running = RunningRequests(H)
    for i in range(20):
        running.add(str(i), i % WORKERS, int(rng.integers(1, 99)), max_new_tokens=99, key=None)
    rows = running.stale_rows(5)
    running.set_remaining(rows, rng.uniform(1, H, len(rows)))
    slots = FreeSlots(np.full(WORKERS, 9), running.project(WORKERS)[0])
    for i in range(12):
        tokens = rng.integers(0, 80, int(rng.integers(1, 3)))
        stays = rng.integers(1, H + 1, len(tokens))
        worker = slots.choose_row()
        slots.admit(worker, WaitingTokens(tokens.astype(float), stays, H).kv_tokens)
        for n, prompt in enumerate(tokens.tolist()):
            running.add(f"new{i}.{n}", worker, prompt, max_new_tokens=99, key=None)
            row = np.array([len(running) - 1])
            running.set_remaining(row, stays[n : n + 1].astype(float))
        fresh = running.project(WORKERS)[0]
        for w in range(WORKERS):
            assert slots.margins(w) == pytest.approx(fresh.max(axis=0) - fresh[w])
    assert slots.free.sum() == WORKERS * 9 - (len(running) - 20)
