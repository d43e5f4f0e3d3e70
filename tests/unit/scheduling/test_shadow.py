"""The shadow equals both placements priced from scratch, and never delays a placement."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eldr_serve.scheduling import Decision, Loads, PlacementRequest, Policy, StepCost, make_policy
from eldr_serve.scheduling.activation import activation_of, levels_of
from eldr_serve.scheduling.cost import StepSums
from eldr_serve.scheduling.placer import Placer
from eldr_serve.scheduling.shadow import Shadow
from eldr_serve.scheduling.types import Lease, LeaseState
from tests.support.tables import fail

L, E = 2, 6
COST = StepCost(2e-3, 3e-4, 1e-6, 7e-4)


class Recorded(Policy):
    def __init__(self, policy: Policy) -> None:
        self.inner, self.positions = policy, {}  # type: tuple[Policy, dict[str, int]]
        self.on_assigned, self.on_progress = policy.on_assigned, policy.on_progress
        self.on_finished, self.update_cost_model = policy.on_finished, policy.update_cost_model

    def select(self, request: PlacementRequest, loads: Loads, rng: np.random.Generator) -> Decision:
        decision = self.inner.select(request, loads, rng)
        self.positions[request.request_id] = decision.position
        return decision


def shadowed_placer(live: str, shadow: Shadow, *workers: str, **options: Any) -> Placer:
    """Return a placer with these workers and a shadow."""
    placer = Placer(make_policy(live), on_policy_error=fail, **options)
    placer.set_workers(workers)
    placer.set_shadow(shadow)
    return placer


def a_request(name: str, rng: np.random.Generator) -> PlacementRequest:
    tokens = int(rng.integers(1, 30))
    counts = rng.integers(0, tokens + 1, (L, E)).astype(np.uint32)
    return PlacementRequest(name, tokens, 10, expert_counts=counts)


def step_seconds(requests: list[PlacementRequest], generated: dict[str, int]) -> float:
    """Return the step time of a worker that holds these requests, from their counts alone."""
    idle = np.ones((L, E))
    for request in requests:
        idle *= 1 - activation_of(levels_of(request.expert_counts / request.prompt_tokens)).astype(float)
    tokens = sum(r.prompt_tokens + generated[r.request_id] for r in requests)
    return float(COST.seconds(len(requests), tokens, (1 - idle).sum()))


@settings(max_examples=40)
@given(
    seed=st.integers(0, 2**32 - 1),
    workers=st.integers(1, 3),
    live=st.sampled_from(["marginal-cost", "shortest-queue", "random"]),
    other=st.sampled_from(["marginal-cost", "least-tokens", "balance-route"]),
    lag=st.integers(1, 7),
)
def test_both_placements_are_priced_as_from_scratch(
    seed: int, workers: int, live: str, other: str, lag: int
) -> None:
    rng = np.random.default_rng(seed)
    policy = Recorded(make_policy(other))
    shadow = Shadow(policy)
    placer = shadowed_placer(live, shadow, *(f"w{w}" for w in range(workers)), seed=seed)
    shadow.update_cost_model(COST)
    requests: dict[str, PlacementRequest] = {}
    generated: dict[str, int] = {}
    priced = np.zeros(3)
    expected: list[tuple[dict[str, int], dict[str, int], dict[str, int]]] = []
    for number in range(14):
        name = f"r{number}"
        requests[name], generated[name] = a_request(name, rng), 0
        placer.submit([Lease(requests[name], LeaseState.SENT)])
        more = {n: int(rng.integers(1, 9)) for n in placer.running if rng.random() < 0.6}
        where = {n: p.position for n, p in placer.running.items()}
        expected.append((where, dict(generated), more))
        generated |= {n: generated[n] + k for n, k in more.items()}
        placer.set_generated_tokens({n: generated[n] for n in more})
        for gone in [n for n in placer.running if rng.random() < 0.2]:
            placer.finish(gone)
        if number % lag == 0:  # the time of its work makes no difference
            shadow.catch_up()
    assert not shadow.catch_up()
    for where, before, more in expected:
        for name, tokens in more.items():
            sides = []
            for positions in (where, {n: policy.positions[n] for n in where}):
                running_requests = [requests[n] for n in where if positions[n] == positions[name]]
                sides.append(step_seconds(running_requests, before))
            priced += tokens * np.array([1.0, *sides])
    assert shadow.totals[:3] == pytest.approx(priced, rel=1e-4)


@pytest.mark.parametrize("name", ["marginal-cost", "shortest-queue", "least-tokens", "round-robin"])
def test_a_policy_saves_nothing_against_itself(name: str) -> None:
    rng = np.random.default_rng(1)
    shadow = Shadow(make_policy(name))
    placer = shadowed_placer(name, shadow, "a", "b", "c")
    placer.update_cost_model(COST)
    for number in range(40):
        placer.submit([Lease(a_request(f"r{number}", rng), LeaseState.SENT)])
        placer.set_generated_tokens({n: p.generated_tokens + 3 for n, p in placer.running.items()})
        if number > 8:
            placer.finish(next(iter(placer.running)))
    shadow.catch_up()
    before = shadow.compare()
    assert before.measured_ms is None
    shadow.observe_steps(StepSums.from_steps([2, 4], [9, 9], [3, 5], [0.01, 0.03]))
    shadow.catch_up()
    comparison = shadow.compare()
    assert comparison.measured_ms == pytest.approx(1e3 * (2 * 0.01 + 4 * 0.03) / 6)
    assert comparison.change_pct == pytest.approx(0, abs=1e-3)
    assert comparison.live_ms == pytest.approx(comparison.shadow_ms) != 0


@pytest.mark.parametrize("name", ["marginal-cost", "least-tokens"])
def test_measured_counts_replace_predicted_ones_in_both_placements(name: str) -> None:
    rng = np.random.default_rng(2)
    shadow = Shadow(make_policy(name))
    placer = shadowed_placer(name, shadow, "a", "b", "c")
    placer.update_cost_model(COST)
    for number in range(40):
        measured = a_request(f"r{number}", rng)
        guess = replace(a_request(f"r{number}", rng), predicted=True)
        placer.submit([Lease(guess, LeaseState.SENT)])
        placer.set_measured_counts(measured)
        placer.set_generated_tokens({n: p.generated_tokens + 3 for n, p in placer.running.items()})
        if number > 8:
            placer.finish(next(iter(placer.running)))
    shadow.catch_up()
    comparison = shadow.compare()
    assert comparison is not None
    assert comparison.live_ms == pytest.approx(comparison.shadow_ms, rel=1e-5)


class OneWorker(Policy):
    def select(self, request: PlacementRequest, loads: Loads, rng: np.random.Generator) -> Decision:
        return Decision(int(loads.available_positions[0]), reason="first")


def test_the_saving_is_positive_if_the_live_policy_is_faster_and_has_an_interval() -> None:
    now = [0.0]
    shadow = Shadow(OneWorker(), clock=lambda: now[0])
    placer = shadowed_placer("shortest-queue", shadow, "a", "b")
    rng = np.random.default_rng(3)
    assert shadow.compare() is None
    for number in range(6):
        placer.submit([Lease(a_request(f"r{number}", rng), LeaseState.SENT)])
        placer.set_generated_tokens({f"r{number}": 5})
        shadow.catch_up()
        now[0] += 11
        comparison = shadow.compare()
        assert (comparison.low_pct is None) == (number < 2)
    assert comparison.tokens == 30
    assert comparison.change_pct < 0  # two workers step faster than one with all requests
    assert comparison.low_pct < comparison.change_pct < comparison.high_pct


def test_the_shadow_includes_running_requests_and_drops_removed_workers() -> None:
    rng = np.random.default_rng(5)
    placer = Placer(make_policy("round-robin"), on_policy_error=fail)
    placer.set_workers(["a", "b"])
    placer.submit([Lease(a_request(f"r{n}", rng), LeaseState.SENT) for n in range(4)])
    placer.set_generated_tokens({"r0": 7})
    policy = Recorded(OneWorker())
    shadow = Shadow(policy)
    placer.set_shadow(shadow)
    shadow.catch_up()
    assert policy.positions == dict.fromkeys(("r0", "r1", "r2", "r3"), 0)
    placer.set_workers([None, "b"])  # r0 and r2 end with their worker
    shadow.catch_up()
    assert {policy.positions[n] for n in ("r1", "r3")} == {1}
    before = shadow.totals[0]
    placer.set_generated_tokens({"r1": 4, "r0": 9})
    shadow.catch_up()
    assert shadow.totals[0] == before + 4


class Following(OneWorker):
    """Knows the requests that have been assigned since the last change of workers."""

    def __init__(self) -> None:
        super().__init__()
        self.positions: dict[str, int] = {}
        self.known: list[set[str]] = []  # those known at each decision

    def on_workers_changed(self, workers: Sequence[str | None]) -> None:
        self.positions.clear()

    def on_assigned(self, request: PlacementRequest, position: int, decision: Decision | None = None) -> None:
        self.positions[request.request_id] = position

    def select(self, request: PlacementRequest, loads: Loads, rng: np.random.Generator) -> Decision:
        self.known.append(set(self.positions))
        return super().select(request, loads, rng)


def test_a_change_of_workers_is_followed_by_all_running_requests() -> None:
    rng, policy = np.random.default_rng(9), Following()
    shadow = Shadow(policy)
    placer = shadowed_placer("round-robin", shadow, "a", "b")
    placer.submit([Lease(a_request(name, rng), LeaseState.SENT) for name in ("r0", "r1")])
    placer.set_workers(["a", "b"], draining=["a"])
    placer.submit([Lease(a_request("r2", rng), LeaseState.SENT)])
    shadow.catch_up()
    everywhere = {"r0": 0, "r1": 0, "r2": 1}
    assert policy.positions == everywhere
    placer.set_workers(["a", "b", "c"])
    shadow.catch_up()
    assert policy.positions == everywhere
    placer.set_workers([None, "b", "c"])  # in the shadow r0 and r1 lose their worker
    shadow.catch_up()
    assert policy.positions["r2"] == policy.positions["r1"] == 1
    assert policy.known[-1] >= {"r2"}


def test_the_first_counts_may_come_after_the_first_tokens() -> None:
    shadow = Shadow(OneWorker())
    placer = shadowed_placer("shortest-queue", shadow, "a", "b")
    placer.submit([Lease(PlacementRequest("unknown", 10, 20), LeaseState.SENT)])
    placer.set_generated_tokens({"unknown": 2})
    shadow.catch_up()
    counted = a_request("counted", np.random.default_rng(7))
    placer.submit([Lease(counted, LeaseState.SENT)])
    placer.set_generated_tokens({"unknown": 3, "counted": 4})
    shadow.catch_up()
    assert shadow.totals[0] == 7


@pytest.mark.parametrize("order", ["lease first", "shadow first"])
def test_tokens_from_before_the_lease_or_the_shadow_are_not_priced(order: str) -> None:
    """A restarted router adopts a lease with its tokens; a shadow that begins finds running answers."""
    rng, shadow = np.random.default_rng(8), Shadow(OneWorker())
    placer = Placer(make_policy("shortest-queue"), on_policy_error=fail)
    placer.set_workers(["a", "b"])
    if order == "shadow first":
        placer.set_shadow(shadow)
    lease = Lease(a_request("adopted", rng), LeaseState.GRANTED, worker="a", generated_tokens=500)
    placer.adopt_lease(lease)
    placer.submit([Lease(a_request("resumed", rng), LeaseState.SENT, generated_tokens=300)])
    if order == "lease first":
        placer.set_shadow(shadow)
    shadow.catch_up()
    assert shadow.totals[0] == 0
    placer.set_generated_tokens({"adopted": 502, "resumed": 303})
    shadow.catch_up()
    assert shadow.totals[0] == 2 + 3


def test_the_shadow_runs_outside_placement_and_must_keep_up(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(Policy):
        def select(self, *_: Any) -> Decision:
            raise KeyError("mine")

    shadow = Shadow(Broken())
    placer = shadowed_placer("shortest-queue", shadow, "a")
    rng = np.random.default_rng(0)
    (placed,) = placer.submit([Lease(a_request("r", rng), LeaseState.SENT)])
    assert placed.state is LeaseState.GRANTED
    with pytest.raises(KeyError):
        shadow.catch_up()
    slow = Shadow(OneWorker())
    placer.set_shadow(slow)
    assert slow.catch_up(budget_s=0.0)  # no time, no work
    monkeypatch.setattr("eldr_serve.scheduling.shadow._MAX_EVENTS", 1)
    placer.finish("r")
    with pytest.raises(OverflowError):
        slow.catch_up()
