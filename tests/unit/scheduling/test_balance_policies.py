"""Dispatch and immediate choice of BalanceRoute, and balance-band."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eldr_serve.scheduling import Loads, PlacementRequest, QueuedPolicy, StepCost, make_policy
from eldr_serve.scheduling.policies.balance_route.dispatch import WaitingTokens
from eldr_serve.scheduling.policies.balance_route.forecast import Forecast
from eldr_serve.scheduling.policies.length_predictors import Oracle
from tests.support.tables import request

RNG = np.random.default_rng(0)
QUEUED = ["balance-route", "balance-route-horizon", "balance-band"]


def waiting_requests(*tokens: int) -> list[PlacementRequest]:
    return [request(f"w{n}", prompt, 1000) for n, prompt in enumerate(tokens)]


def dispatch(policy: Any, requests: list[PlacementRequest], state: Loads) -> dict[int, int]:
    return {index: decision.position for index, decision in policy.dispatch(requests, state, RNG)}


def dispatch_order(policy: Any, queue: list[PlacementRequest], state: Loads) -> list[str]:
    """Return the requests that five dispatches of one slot each place, in order."""
    order = []
    for _ in range(5):
        ((index, _),) = policy.dispatch(queue, state, RNG)
        order.append(queue.pop(index).request_id)
    return order


@pytest.mark.parametrize("name", QUEUED)
@given(
    st.lists(st.integers(0, 4000), max_size=20),
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 9000), st.booleans()), min_size=1, max_size=6),
    st.integers(1, 12),
    st.none() | st.integers(0, 12),
    st.integers(0, 9999),
)
def test_every_slot_is_filled_once(
    name: str,
    tokens: list[int],
    workers: list[tuple[int, int, bool]],
    candidates: int,
    threshold: int | None,
    seed: int,
) -> None:
    parameters: dict[str, Any] = {
        "balance-route": {"candidates": candidates, "threshold": threshold},
        "balance-route-horizon": {"candidates": candidates, "threshold": threshold, "horizon": 5},
        "balance-band": {"lookahead": candidates, "horizon": 5},
    }[name]
    policy = make_policy(name, slots=4, max_overtakes=3, **parameters)
    assert isinstance(policy, QueuedPolicy)
    rng = np.random.default_rng(seed)
    state = Loads.from_counts(*map(list, zip(*workers, strict=True)))
    queue = waiting_requests(*tokens)
    for n in range(int(rng.integers(4))):  # requests that the policy knows
        policy.on_assigned(request(f"held{n}", 100, 50), int(rng.integers(len(state))))
    while True:
        free = np.where(state.available, np.maximum(0, 4 - state.in_flight), 0)
        given_out = policy.dispatch(queue, state, rng)
        indices = [index for index, _ in given_out]
        assert len(set(indices)) == len(indices) == min(len(queue), sum(free))
        for w in range(len(state)):
            assert sum(decision.position == w for _, decision in given_out) <= free[w]
        assert all(d.reason == name and d.num_candidates == state.available.sum() for _, d in given_out)
        if not given_out:
            break
        queue = [h for n, h in enumerate(queue) if n not in indices]
        # All requests on available workers end.
        state = replace(state, in_flight=np.where(state.available, 0, state.in_flight))


@pytest.mark.parametrize(
    ("parameters", "state", "tokens", "placed"),
    [
        # The largest margin takes the request that fills it best, or overflows it least.
        ({"slots": 2}, Loads.from_counts([2, 1], [1000, 600]), [900, 350, 600], {1: 1}),
        ({"slots": 2}, Loads.from_counts([2, 1], [1000, 600]), [900, 410, 600], {1: 1}),
        # A set may fill it better than any request.
        ({"slots": 4}, Loads.from_counts([4, 2], [1000, 100]), [800, 450, 700, 449], {1: 1, 3: 1}),
        # Only the longest waiting are compared in sets, a single one is taken from further back.
        ({"slots": 3, "candidates": 2}, Loads.from_counts([3, 1], [1000, 600]), [10, 20, 400], {0: 1, 1: 1}),
        (
            {"slots": 2, "candidates": 2, "lookahead": 2},
            Loads.from_counts([2, 1], [1000, 600]),
            [10, 20, 400],
            {1: 1},
        ),
        (
            {"slots": 2, "candidates": 2, "lookahead": 3},
            Loads.from_counts([2, 1], [1000, 600]),
            [10, 20, 400],
            {2: 1},
        ),
        (
            {"slots": 2, "candidates": 2, "lookahead": None},
            Loads.from_counts([2, 1], [1000, 600]),
            [10, 20, 400],
            {1: 1},
        ),
    ],
)
def test_the_request_that_fits_the_margin_best_is_chosen(
    parameters: dict[str, Any], state: Loads, tokens: list[int], placed: dict[int, int]
) -> None:
    policy = make_policy("balance-route", threshold=99, **parameters)
    assert dispatch(policy, waiting_requests(*tokens), state) == placed


def paper_assignments(
    tokens: list[int], workers: list[tuple[int, int]], threshold: int, candidates: int
) -> list[tuple[int, int]]:
    """Return the (request, worker) that BR-0 admits by the text of the paper, section 3.2.

    Among sets of equal F, the first by size and then by its bits is taken, which the paper leaves open.

    Args:
        workers: free slots and KV tokens of each worker.
    """
    free, loads = ([worker[part] for worker in workers] for part in (0, 1))
    waiting, assignments = list(range(len(tokens))), []
    while waiting and any(free):
        margins = [max(loads) - load for load in loads]
        worker = max(range(len(workers)), key=lambda g: (free[g], margins[g]))

        def f(chosen: list[int], margin: int = margins[worker]) -> int:
            added = sum(tokens[request] for request in chosen)
            return added - len(workers) * max(0, added - margin)

        if sum(free) > threshold:  # stage 1
            best = max(([request] for request in waiting), key=f)
        else:
            head = waiting[:candidates]
            masks = sorted(range(1, 1 << len(head)), key=lambda mask: (mask.bit_count(), mask))
            sets = [[request for bit, request in enumerate(head) if mask >> bit & 1] for mask in masks]
            best = max((chosen for chosen in sets if len(chosen) <= free[worker]), key=f)
            if f(best) <= 0:
                best = max(([request] for request in head), key=f)
        assignments += [(request, worker) for request in best]
        free[worker] -= len(best)
        loads[worker] += sum(tokens[request] for request in best)
        waiting = [request for request in waiting if request not in best]
    return assignments


@given(
    st.lists(st.integers(0, 3000), min_size=1, max_size=14),
    st.lists(st.tuples(st.integers(0, 4), st.integers(0, 5000)), min_size=1, max_size=4),
    st.integers(0, 10),
    st.integers(1, 5),
)
def test_without_a_lookahead_the_two_stages_are_those_of_the_paper(
    tokens: list[int], workers: list[tuple[int, int]], threshold: int, candidates: int
) -> None:
    policy: Any = make_policy(
        "balance-route", slots=4, threshold=threshold, candidates=candidates, lookahead=None
    )
    state = Loads.from_counts([4 - free for free, _ in workers], [load for _, load in workers])
    placed = policy.dispatch(waiting_requests(*tokens), state, RNG)
    expected = paper_assignments(tokens, workers, threshold, candidates)
    assert [(index, decision.position) for index, decision in placed] == expected


def test_the_largest_request_goes_to_the_worker_with_most_free_slots() -> None:
    policy: Any = make_policy("balance-route", slots=8, threshold=0)
    first = policy.dispatch(
        waiting_requests(50, 500, 90), Loads.from_counts([5, 2, 4], [1000, 400, 700]), RNG
    )[0]
    assert (first[0], first[1].position) == (1, 1)


@pytest.mark.parametrize(("ends", "chosen"), [(True, 1), (False, 0)])
def test_a_request_that_ends_soon_may_overflow_a_margin(ends: bool, chosen: int) -> None:
    """The heaviest worker becomes lighter after two steps, when the brief request has ended.

    As in the paper, both requests count at every step, and the first of equals is chosen.
    """
    policy: Any = make_policy(
        "balance-route-horizon", slots=2, threshold=99, horizon=9, gate=0.1, new_requests_end=ends
    )
    lengths = {"heavy": 3, "light": 50, "brief": 2, "long": 60}
    policy.length_predictor = Oracle(lengths)
    policy.on_assigned(request("heavy", 900, 99), 0)
    policy.on_assigned(request("light", 100, 99), 1)
    queue = [request("long", 700, 99), request("brief", 700, 99)]
    assert dispatch(policy, queue, Loads.from_counts([2, 1], [900, 100])) == {chosen: 1}


def test_without_ends_only_the_projection_shrinks() -> None:
    tokens, stays = np.array([5.0, 7.0]), np.array([1, 3])
    ending, constant = (WaitingTokens(tokens, stays, 3, end=end) for end in (True, False))
    assert constant.counted_tokens.tolist() == [[5] * 4, [7] * 4]
    assert ending.counted_tokens.tolist() == [[5, 5, 0, 0], [7] * 4]
    assert constant.kv_tokens.tolist() == ending.kv_tokens.tolist() == [[5, 6, 0, 0], [7, 8, 9, 10]]


def test_a_request_is_overtaken_a_limited_number_of_times() -> None:
    policy: Any = make_policy("balance-route", slots=2, threshold=99, max_overtakes=3)
    state = Loads.from_counts([2, 1], [1000, 900])
    assert (
        dispatch_order(policy, [request("large", 5000), *waiting_requests(*[100] * 9)], state).index("large")
        == 3
    )


@pytest.mark.parametrize("name", QUEUED)
def test_overtaking_is_counted_if_other_requests_are_dispatched_between(name: str) -> None:
    """Requests that must avoid a worker are dispatched apart from the others."""
    policy: Any = make_policy(name, slots=2, threshold=99, max_overtakes=2)
    state = Loads.from_counts([2, 1], [1000, 900])
    queue = [request("large", 5000), *waiting_requests(*[100] * 9)]
    order = []
    for turn in range(4):
        policy.dispatch([request(f"other {turn}", 100)], state, RNG)
        ((index, _),) = policy.dispatch(queue, state, RNG)
        order.append(queue.pop(index).request_id)
    assert order.index("large") == 2


def test_a_cancelled_request_leaves_no_count() -> None:
    policy: Any = make_policy("balance-route-horizon", slots=2, threshold=99)
    policy.dispatch(
        [request("large", 5000), *waiting_requests(100)], Loads.from_counts([2, 1], [1000, 900]), RNG
    )
    assert list(policy._overtaken) == ["large"]
    policy.on_finished("large")
    assert not policy._overtaken


@pytest.mark.parametrize("name", QUEUED)
def test_an_immediate_request_ignores_slots(name: str) -> None:
    policy = make_policy(name)
    full = Loads.from_counts([500, 500, 500], [1000, 900, 100])
    assert policy.select(request("r", 300), full, RNG).position == 2
    assert policy.select(request("r", 0), Loads.from_counts([3], [5]), RNG).position == 0


def test_requests_are_placed_at_once_up_to_a_few_beyond_the_slots() -> None:
    policy: Any = make_policy("balance-route", queue=False, slots=4, overcommit=1)
    assert not policy.has_queue
    state = Loads.from_counts([5, 4, 4], [10, 900, 1000])
    decision = policy.select(request("r", 50), state, RNG)
    assert (decision.position, decision.num_candidates) == (1, 2)
    full = Loads.from_counts([5, 5], [10, 900])
    assert policy.select(request("r", 50), full, RNG).position == 0


def request_using(name: str, experts: list[int], tokens: int = 100) -> PlacementRequest:
    """Return a request whose tokens all use these of 8 experts."""
    counts = np.zeros((1, 8), np.uint32)
    counts[0, experts] = tokens
    return PlacementRequest(name, tokens, 100, expert_counts=counts)


def balance_band(band_tokens: float, **more: Any) -> Any:
    """Return balance-band where worker 0 runs a user of experts 0 and 1, and worker 1 one of 2 and 3."""
    policy: Any = make_policy("balance-band", slots=2, band_tokens=band_tokens, **more)
    policy.on_assigned(request_using("a", [0, 1]), 0)
    policy.on_assigned(request_using("b", [2, 3]), 1)
    return policy


def test_balance_band_equals_marginal_cost_while_slots_are_free() -> None:
    state = Loads.from_counts([1, 0, 1], [900, 0, 100])
    marginal: Any = make_policy("marginal-cost", affinity=0.0)
    cost = StepCost(1e-3, 1e-5, 1e-9, 1e-3)
    for experts in ([0, 1], [2, 3], [5, 6]):
        policy = balance_band(0)
        for chooser in (policy, marginal):
            chooser.update_cost_model(cost)
            chooser.on_assigned(request_using("a", [0, 1]), 0)
            chooser.on_assigned(request_using("b", [2, 3]), 2)
        newcomer = request_using("new", experts)
        expected = marginal.select(newcomer, state, RNG).position
        assert dispatch(policy, [newcomer], state) == {0: expected}
        policy.on_finished("b")


def test_a_request_within_the_balance_band_goes_to_its_experts() -> None:
    state = Loads.from_counts([1, 1, 2], [700, 700, 1000])
    queue = [request_using("x", [2, 3]), request_using("y", [0, 1])]
    assert dispatch(balance_band(50), queue, state) == {0: 1, 1: 0}
    assert dispatch(balance_band(50), queue[::-1], state) == {0: 0, 1: 1}


def test_the_waiting_request_that_adds_fewest_experts_is_chosen_if_it_balances_as_well() -> None:
    """Worker 0 has one slot and lacks 300 tokens: `stranger` fills the margin, `friend` does not."""
    state = Loads.from_counts([1, 2, 2], [700, 900, 1000])
    queue = [request_using("stranger", [2, 3], 300), request_using("friend", [0, 1], 220)]
    assert dispatch(balance_band(100), queue, state) == {1: 0}
    assert dispatch(balance_band(10), queue, state) == {0: 0}


def test_experts_that_a_request_would_add_on_any_worker_do_not_count() -> None:
    """`wide` adds two experts to worker 0 and three to worker 1; `narrow` one and none."""
    state = Loads.from_counts([1, 2, 2], [700, 700, 1000])
    queue = [request_using("narrow", [2]), request_using("wide", [0, 5, 6])]
    assert dispatch(balance_band(50), queue, state) == {1: 0}


def test_overdue_requests_go_first_within_the_balance_band() -> None:
    policy = balance_band(1e6, max_overtakes=2, lookahead=3)
    state = Loads.from_counts([1, 2], [700, 900])
    queue = [request_using("stranger", [2, 3]), *(request_using(f"friend{n}", [0, 1]) for n in range(6))]
    assert dispatch_order(policy, queue, state).index("stranger") == 2


def test_balance_band_without_counts_uses_balance_alone() -> None:
    policy: Any = make_policy("balance-band", slots=2, band_tokens=0)
    assert dispatch(policy, waiting_requests(900, 290), Loads.from_counts([1, 2], [700, 1000])) == {1: 0}
    assert policy.parameters == make_policy("balance-band", **policy.parameters.model_dump()).parameters


def test_the_horizon_includes_workers_that_become_empty_soon() -> None:
    current: Any = make_policy("balance-route", slots=4)
    ahead: Any = make_policy("balance-route-horizon", slots=4, horizon=20, gamma=1.0)
    ahead.length_predictor = Oracle({"a": 1, "b": 500, "c": 500})
    for policy in (current, ahead):
        for worker, (name, tokens) in enumerate([("a", 1000), ("b", 900), ("c", 1000)]):
            policy.on_assigned(request(name, tokens, 900), worker)
    newcomer = request("n", 500, 900)
    state = Loads.from_counts([1, 1, 1], [1000, 900, 1000])
    assert current.select(newcomer, state, RNG).position == 1
    assert ahead.select(newcomer, state, RNG).position == 0


@pytest.mark.parametrize("new_requests_end", [True, False])
def test_a_request_that_is_placed_at_once_counts_at_every_step(new_requests_end: bool) -> None:
    """As in Equation 2. Until its expected end it would fit on workers 1 and 2."""
    options: dict[str, Any] = {"queue": False, "horizon": 20, "gamma": 1.0}
    policy: Any = make_policy("balance-route-horizon", new_requests_end=new_requests_end, **options)
    policy.length_predictor = Oracle({"a": 1, "b": 500, "c": 500, "new": 1})
    for worker, (name, tokens) in enumerate([("a", 1000), ("b", 600), ("c", 300)]):
        policy.on_assigned(request(name, tokens, 900), worker)
    state = Loads.from_counts([1, 1, 1], [1000, 600, 300])
    assert policy.select(request("new", 400, 900), state, RNG).position == 0


def test_load_beyond_the_policys_own_requests_counts() -> None:
    forecast = Forecast(3, "survival", 4, 0.5)
    forecast.on_assigned(request("a", 100, 900), 1)
    projected = forecast.project(Loads.from_counts([2, 2, 0], [700, 150, 0]))
    assert projected.tolist() == [[700, 702, 704, 706], [150, 152, 154, 156], [0, 0, 0, 0]]
    forecast.on_assigned(request("b", 50, 900), 0)
    gone = forecast.project(Loads.from_counts([0, 1], [0, 100]))
    assert gone.tolist() == [[0, 1, 2, 3], [100, 101, 102, 103]]
