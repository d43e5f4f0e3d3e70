"""No request and no policy stops the router: load decides if the policy fails."""

from typing import Any

import numpy as np
import pytest

from eldr_serve.scheduling import Decision, Loads, NoWorkerError, Policy, QueuedPolicy, make_policy
from eldr_serve.scheduling.guarded_policy import GuardedPolicy
from eldr_serve.scheduling.policies.balance_route.balance import BalanceRoute
from eldr_serve.scheduling.types import LeaseState
from tests.support.fake_router import ingress_lease, loads, place_one, release, router_state
from tests.support.tables import request

HORIZON = ["balance-route-horizon", "balance-band"]
LOADS = Loads(np.array([2, 0, 1]), np.zeros(3, np.int64), np.array([True, False, True]))
RNG = np.random.default_rng(0)


@pytest.mark.parametrize("policy", HORIZON)
@pytest.mark.parametrize("tokens", [10**30, 2**63, 2**63 - 1, -(10**30)])
def test_requests_of_absurd_size_are_placed_and_so_are_later_ones(policy: str, tokens: int) -> None:
    state = router_state(policy=policy)
    assert place_one(state, "absurd", max_new_tokens=tokens).state is LeaseState.GRANTED
    state.leases.adopt_lease(ingress_lease("elsewhere", "r1", max_new_tokens=tokens))
    for number in range(3):
        assert place_one(state, str(number)).state is LeaseState.GRANTED
        state.leases.set_generated_tokens({"absurd": 1 + number})
        state.leases.adopt_lease(ingress_lease("elsewhere", "r1", max_new_tokens=tokens))
    state.live_settings.set_policy(policy, {})
    assert loads(state)["r1"][0] >= 1
    release(state, "absurd", "elsewhere", "0", "1", "2")
    assert set(loads(state).values()) == {(0, 0)}
    assert not state.counters["policy_errors"]


class Broken(QueuedPolicy):
    def select(self, *_: Any) -> Decision:
        raise OverflowError

    def dispatch(self, *_: Any) -> list[tuple[int, Decision]]:
        raise OverflowError

    def on_assigned(self, *_: Any) -> None:
        raise OverflowError

    on_finished = on_progress = update_cost_model = on_assigned


class BrokenProperties(Broken):
    @property
    def has_queue(self) -> bool:
        raise OverflowError

    def slots_per_worker(self) -> int | None:
        raise OverflowError


class Chooses(QueuedPolicy):
    """A policy that chooses a worker for each of these queued requests."""

    def __init__(self, worker: Any, *indices: Any) -> None:
        super().__init__()
        self.worker, self.indices = worker, indices

    def select(self, *_: Any) -> Decision:
        return Decision(self.worker, num_candidates=3)

    def dispatch(self, *_: Any) -> list[tuple[int, Decision]]:
        return [(index, self.select()) for index in self.indices]


def guarded_policy(policy: Policy) -> tuple[GuardedPolicy, list[Exception]]:
    failures: list[Exception] = []
    return GuardedPolicy(policy, failures.append), failures


class ChoosesWith(Policy):
    """A policy that chooses the first worker with these fields."""

    def __init__(self, **fields: Any) -> None:
        super().__init__()
        self.fields = fields

    def select(self, *_: Any) -> Decision:
        return Decision(0, **self.fields)


def test_numbers_of_numpy_become_plain_ones() -> None:
    policy = ChoosesWith(num_candidates=LOADS.available.sum(), similarity=np.float32(0.5))
    guard, failures = guarded_policy(policy)
    decision = guard.select(request(), LOADS, RNG)
    assert (type(decision.num_candidates), type(decision.similarity)) == (int, float)
    assert (decision.num_candidates, decision.similarity, failures) == (2, 0.5, [])


@pytest.mark.parametrize(
    "fields", [{"num_candidates": None}, {"num_candidates": 1.5}, {"similarity": "near"}]
)
def test_load_decides_if_a_field_has_another_type(fields: dict[str, Any]) -> None:
    guard, failures = guarded_policy(ChoosesWith(**fields))
    assert guard.select(request(), LOADS, RNG).reason == "policy-error"
    assert len(failures) == 1


@pytest.mark.parametrize("policy", [Broken(), *map(Chooses, (1, -1, 3, 2.0, None))])
def test_load_decides_if_the_policy_fails(policy: Policy) -> None:
    guard, failures = guarded_policy(policy)
    assert guard.select(request(), LOADS, RNG) == Decision(2, num_candidates=2, reason="policy-error")
    assert len(failures) == 1


@pytest.mark.parametrize("indices", [(0, 0), (-1,), (2,), (0.0,)])
def test_load_decides_if_the_policy_assigns_wrong_requests(indices: tuple[Any, ...]) -> None:
    guard, failures = guarded_policy(Chooses(2, *indices))
    decisions = guard.dispatch([request("a"), request("b")], LOADS, RNG)
    assert [(index, decision.reason) for index, decision in decisions] == [
        (n, "policy-error") for n in (0, 1)
    ]
    assert len(failures) == 1


def test_no_request_waits_for_a_queued_policy_that_fails() -> None:
    guard, failures = guarded_policy(Broken())
    decisions = guard.dispatch([request(str(n)) for n in range(4)], LOADS, RNG)
    assert [(index, decision.position) for index, decision in decisions] == [(0, 2), (1, 0), (2, 2), (3, 0)]
    guard.on_assigned(request(), 0)
    guard.on_progress({"r": 1})
    guard.on_finished("r")
    assert len(failures) == 4


def test_a_queued_policy_whose_properties_fail_places_by_load() -> None:
    guard, failures = guarded_policy(BrokenProperties())
    assert not guard.has_queue
    assert [decision.position for _, decision in guard.dispatch([request()], LOADS, RNG)] == [2]
    assert len(failures) == 3


@pytest.mark.parametrize(("slots", "workers"), [(1, []), (2, [2]), (3, [2, 0, 2]), (9, [2, 0, 2, 0, 2])])
def test_load_fills_only_free_slots_if_a_policy_with_slots_fails(slots: int, workers: list[int]) -> None:
    class BrokenBalance(BalanceRoute):
        dispatch = Broken.dispatch  # type: ignore[assignment]

    guard, _ = guarded_policy(BrokenBalance(slots=slots))
    decisions = guard.dispatch([request(str(n)) for n in range(5)], LOADS, RNG)
    assert [(index, decision.position) for index, decision in decisions] == list(enumerate(workers))


def test_the_guard_passes_on_that_no_worker_is_available() -> None:
    guard, failures = guarded_policy(make_policy("shortest-queue"))
    with pytest.raises(NoWorkerError):
        guard.select(request(), Loads.from_counts([2, 0, 1], available=False), RNG)
    assert not failures


def test_the_largest_allowed_parameters_work() -> None:
    most = 2**31 - 1
    policy = BalanceRoute(slots=most, lookahead=most, threshold=most, max_overtakes=most, overcommit=most)
    assert len(policy.dispatch([request(str(n)) for n in range(5)], LOADS, RNG)) == 5
