"""marginal-cost against the sum over all requests that it approximates, and the fit of its step cost."""

import json
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from eldr_serve.scheduling import Loads, PlacementRequest, StepCost, make_policy
from eldr_serve.scheduling.activation import activation_of
from eldr_serve.scheduling.cost import StepSums, solve_non_negative
from eldr_serve.scheduling.policies import marginal_cost
from eldr_serve.scheduling.policies.marginal_cost import MarginalCost
from eldr_serve.scheduling.prefixes import PromptBlocks

L, E, TOP_K = 3, 16, 2
RNG = np.random.default_rng(0)
COST = StepCost(2e-3, 1e-4, 1e-7, 5e-5)
NO_BLOCKS = PromptBlocks(np.zeros(0, np.uint64), 16)  # of a request whose worker also prefills
JUMPING = replace(COST, batch_s={1: 0.0, 3: 1e-4, 4: 3e-3, 8: 4e-3})


def request_like(request_id: str, seed: int, tokens: int = 40) -> PlacementRequest:
    rng = np.random.default_rng(seed)
    taste = rng.dirichlet(np.full(E, 0.3), size=L)
    counts = np.stack([rng.multinomial(tokens * TOP_K, t) for t in taste])
    counts = np.minimum(counts, tokens).astype(np.uint32)
    return PlacementRequest(request_id, tokens, 10, expert_counts=counts)


def probability(h: PlacementRequest) -> np.ndarray:
    return np.minimum(h.expert_counts.reshape(-1) / h.prompt_tokens, 0.98)


def expected_union(on_worker: list[PlacementRequest]) -> float:
    idle = np.ones(L * E)
    for h in on_worker:
        idle *= 1 - probability(h)
    return float((1 - idle).sum())


def total_seconds(cost: StepCost, on_worker: list[PlacementRequest]) -> float:
    tokens = sum(h.prompt_tokens for h in on_worker)
    return len(on_worker) * float(cost.seconds(len(on_worker), tokens, expected_union(on_worker)))


def loads(placement: list[list[PlacementRequest]]) -> Loads:
    return Loads.from_counts(
        [len(p) for p in placement], [sum(h.prompt_tokens for h in p) for p in placement]
    )


def assign(policy: Any, requests: list[PlacementRequest], workers: list[int]) -> None:
    for request, worker in zip(requests, workers, strict=True):
        policy.on_assigned(request, worker)


def by_worker(requests: list[PlacementRequest], workers: list[int], n: int) -> list[list[PlacementRequest]]:
    return [[r for r, w in zip(requests, workers, strict=True) if w == worker] for worker in range(n)]


@settings(max_examples=40)
@given(
    seed=st.integers(0, 10_000),
    requests=st.integers(0, 24),
    workers=st.integers(1, 5),
    cost=st.sampled_from([COST, JUMPING]),
)
def test_the_choice_minimises_the_sum_over_all_requests(
    seed: int, requests: int, workers: int, cost: StepCost
) -> None:
    policy: Any = make_policy("marginal-cost", affinity=0.0, cost=cost.as_dict(), tail_power=1)
    rng = np.random.default_rng(seed)
    running = [request_like(f"r{i}", seed + i) for i in range(requests)]
    positions = rng.integers(workers, size=requests).tolist()
    assign(policy, running, positions)
    placement, newcomer = by_worker(running, positions, workers), request_like("new", seed + 999)
    added = policy.added_cost(newcomer, loads(placement))
    expected = [total_seconds(cost, [*p, newcomer]) - total_seconds(cost, p) for p in placement]
    assert added == pytest.approx(expected, rel=0.01)  # probabilities are kept in 8 bits
    chosen = policy.select(newcomer, loads(placement), rng)
    assert added[chosen.position] <= added.min() * (1 + 1e-6)
    assert (chosen.num_candidates, chosen.reason) == (workers, "marginal-cost")


@settings(max_examples=60)
@given(
    seed=st.integers(0, 10_000),
    requests=st.integers(0, 24),
    replicas=st.integers(1, 3),
    ranks=st.integers(1, 4),
    cost=st.sampled_from([COST, JUMPING]),
)
def test_ranks_that_wait_for_each_other_are_priced_by_their_common_step(
    seed: int, requests: int, replicas: int, ranks: int, cost: StepCost
) -> None:
    policy: Any = make_policy("marginal-cost", affinity=0.0, cost=cost.as_dict(), tail_power=1)
    workers = replicas * ranks
    policy.on_workers_changed([f"r{w // ranks}/{w % ranks}" for w in range(workers)])
    rng = np.random.default_rng(seed)
    running = [request_like(f"r{i}", seed + i, int(rng.integers(10, 3000))) for i in range(requests)]
    positions = rng.integers(workers, size=requests).tolist()
    assign(policy, running, positions)
    placement, newcomer = by_worker(running, positions, workers), request_like("new", seed + 999, 700)

    def own_seconds(on_rank: list[PlacementRequest]) -> float:
        return float(cost.seconds(len(on_rank), sum(h.prompt_tokens for h in on_rank), 0))

    def seconds_of_all(replica: int, more_on: int | None = None) -> float:
        """Return the step time of the replica times its requests, with a newcomer on one of its ranks."""
        by_rank = [placement[w] + [newcomer] * (w == more_on) for w in members[replica]]
        everyone = [h for on_rank in by_rank for h in on_rank]
        experts_s = cost.per_expert_s * expected_union(everyone) / ranks
        return len(everyone) * (max(map(own_seconds, by_rank)) + experts_s)

    members = np.arange(workers).reshape(replicas, ranks).tolist()
    expected = [seconds_of_all(w // ranks, w) - seconds_of_all(w // ranks) for w in range(workers)]
    added = policy.added_cost(newcomer, loads(placement))
    assert added == pytest.approx(expected, rel=0.02)  # probabilities are kept in 8 bits
    chosen = policy.select(newcomer, loads(placement), rng)
    best = chosen.position
    assert chosen.num_candidates == workers
    assert added[best] <= added.min() * (1 + 1e-6)
    ties = [w for w in members[best // ranks] if added[w] == added[best]]
    assert own_seconds(placement[best]) == min(own_seconds(placement[w]) for w in ties)


@pytest.mark.parametrize(("workers", "position"), [(["a", None, "b"], 0), (["a/0", None, "a/1"], 2)])
def test_a_request_avoids_the_rank_whose_kv_tokens_all_ranks_wait_for(
    workers: list[str | None], position: int
) -> None:
    """Alone, the first worker would be better: it has many KV tokens, but also the request's experts."""
    policy: Any = make_policy("marginal-cost", affinity=0.0, cost=COST.as_dict(), tail_power=1)
    policy.on_workers_changed(workers)
    assign(policy, [request_like("long", 1, 1000), request_like("short", 2)], [0, 2])
    load = Loads.from_counts([1, 0, 1], [1000, 0, 40], [True, False, True])
    assert policy.select(request_like("new", 1), load, RNG).position == position


def test_experts_choose_the_replica_and_balance_its_rank() -> None:
    for taste, position in ((1, 1), (2, 2)):
        policy: Any = make_policy("marginal-cost")
        policy.on_workers_changed(["a/0", "a/1", "b/0", "b/1"])
        positions = [0, 0, 1, 2, 3, 3]
        running = [request_like(str(n), 1 + worker // 2) for n, worker in enumerate(positions)]
        assign(policy, running, positions)
        load = loads(by_worker(running, positions, 4))
        assert policy.select(request_like("new", taste), load, RNG).position == position


@settings(max_examples=60)
@given(
    seed=st.integers(0, 10_000),
    requests=st.integers(0, 24),
    workers=st.integers(1, 5),
    most=st.sampled_from([0, 3, 500]),
    answers=st.lists(st.integers(1, 90), max_size=5),
)
def test_prefill_and_decode_are_compared_in_seconds_of_all_requests(
    seed: int, requests: int, workers: int, most: int, answers: list[int]
) -> None:
    cost = replace(COST, per_prompt_token_s=3e-4)
    policy: Any = make_policy("marginal-cost", affinity=0.0, cost=cost.as_dict(), tail_power=1)
    for number, tokens in enumerate(answers):
        ended = request_like(f"ended{number}", number)
        policy.on_assigned(ended, 0)
        policy.on_progress({ended.request_id: tokens})
        policy.on_finished(ended.request_id)
    policy.on_assigned(request_like("aborted", 0), 0)
    policy.on_progress({"aborted": 70})  # this is not the length of an answer
    policy.on_aborted("aborted")
    rng = np.random.default_rng(seed)
    running = [request_like(f"r{i}", seed + i) for i in range(requests)]
    positions = rng.integers(workers, size=requests).tolist()
    assign(policy, running, positions)
    placement = by_worker(running, positions, workers)
    newcomer = replace(request_like("new", seed + 999), max_new_tokens=most, blocks=NO_BLOCKS)
    cached = rng.integers(0, newcomer.prompt_tokens + 1, workers)
    lacking = [rng.integers(0, 40, rng.integers(len(p) + 1)) for p in placement]  # tokens not yet computed
    loads_now = replace(
        loads(placement), cached_tokens=cached, prefill_tokens=np.array([m.sum() for m in lacking])
    )
    usual = float(np.mean(answers)) if answers else 128.0
    steps = min(usual, most or usual)

    def seconds_of_all(worker: int, newcomers: list[PlacementRequest]) -> float:
        """Return the seconds of all requests on the worker while the newcomer stays.

        Prompts are computed in turn, and every request waits until the last one is computed.
        """
        prompts = [*lacking[worker], *(n.prompt_tokens - cached[worker] for n in newcomers)]
        worker_requests = [*placement[worker], *newcomers]
        return (
            steps * total_seconds(cost, worker_requests)
            + len(worker_requests) * float(sum(prompts)) * cost.per_prompt_token_s
        )

    expected = [(seconds_of_all(w, [newcomer]) - seconds_of_all(w, [])) / steps for w in range(workers)]
    added = policy.added_cost(newcomer, loads_now)
    assert added == pytest.approx(expected, rel=0.01)
    assert added[policy.select(newcomer, loads_now, rng).position] <= added.min() * (1 + 1e-6)


@settings(max_examples=40)
@given(seed=st.integers(0, 10_000), requests=st.integers(0, 24), prefills=st.booleans())
def test_without_a_tail_power_the_price_is_exactly_the_added_seconds(
    seed: int, requests: int, prefills: bool
) -> None:
    cost = replace(COST, per_prompt_token_s=3e-4 if prefills else 0.0)
    policy: Any = make_policy("marginal-cost", affinity=0.0, cost=cost.as_dict(), tail_power=1)
    rng = np.random.default_rng(seed)
    running = [request_like(f"r{i}", seed + i) for i in range(requests)]
    positions = rng.integers(4, size=requests).tolist()
    assign(policy, running, positions)
    newcomer = replace(request_like("new", seed + 999), blocks=NO_BLOCKS)
    load = loads(by_worker(running, positions, 4))
    loads_now = replace(load, prefill_tokens=rng.integers(0, 99, 4) if prefills else None)
    added = policy.added_cost(newcomer, loads_now)
    more = policy.activation.p_idle[:4] @ activation_of(policy.activation.estimate_levels(newcomer))
    active, tokens = policy.activation.expected_active[:4], newcomer.prompt_tokens
    decode, _ = cost.added_seconds(
        load.in_flight, load.kv_tokens, active, more_tokens=tokens, more_experts=more
    )
    prefill = (load.in_flight + 1) * tokens + (loads_now.prefill_tokens if prefills else 0)
    steps = newcomer.max_new_tokens
    assert np.array_equal(added, decode + prefill * (cost.per_prompt_token_s / steps))


@settings(max_examples=40)
@given(
    seed=st.integers(0, 10_000),
    requests=st.integers(0, 24),
    workers=st.integers(1, 6),
    power=st.sampled_from([1.5, 4.0, 16.0]),
)
def test_a_tail_power_raises_the_price_of_slow_and_full_workers_alone(
    seed: int, requests: int, workers: int, power: float
) -> None:
    cost = replace(COST, per_prompt_token_s=3e-4)
    plain, convex = (
        cast("Any", make_policy("marginal-cost", affinity=0, cost=cost.as_dict(), tail_power=p))
        for p in (1, power)
    )
    rng = np.random.default_rng(seed)
    running = [request_like(f"r{i}", seed + i) for i in range(requests)]
    positions = rng.integers(workers, size=requests).tolist()
    for policy in (plain, convex):
        assign(policy, running, positions)
    placement = by_worker(running, positions, workers)
    newcomer = replace(request_like("new", seed + 999), blocks=NO_BLOCKS)
    pending = rng.integers(0, 90, workers)
    loads_now = replace(loads(placement), prefill_tokens=pending)
    tokens_s = cost.per_prompt_token_s / newcomer.max_new_tokens
    step_s = [
        total_seconds(cost, [*requests_of_worker, newcomer]) / (len(requests_of_worker) + 1)
        + (newcomer.prompt_tokens + int(waiting)) * tokens_s
        for requests_of_worker, waiting in zip(placement, pending, strict=True)
    ]
    slow_s, large = 1.05 * float(np.median(step_s)), 1.5 * (requests / workers + 1)
    expected = [
        price * max(1.0, own_s / slow_s, (len(requests_of_worker) + 1) / large) ** (power - 1)
        for price, own_s, requests_of_worker in zip(
            plain.added_cost(newcomer, loads_now), step_s, placement, strict=True
        )
    ]
    added = convex.added_cost(newcomer, loads_now)
    assert added == pytest.approx(expected, rel=0.005 * power)  # probabilities are kept in 8 bits
    assert added[convex.select(newcomer, loads_now, rng).position] <= added.min() * (1 + 1e-6)


def test_a_cost_of_nothing_has_no_slow_worker() -> None:
    free = dict.fromkeys(StepCost().as_dict(), 0.0)
    policy: Any = make_policy("marginal-cost", cost=free, tail_power=16)
    assert not policy.added_cost(request_like("new", 1), Loads.from_counts([3, 0])).any()


def test_all_workers_are_priced_together(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, seconds = [], StepCost.seconds

    def count_and_price(self: StepCost, *parts: Any) -> Any:
        calls.append(parts)
        return seconds(self, *parts)

    monkeypatch.setattr(StepCost, "seconds", count_and_price)
    policy = make_policy("marginal-cost")
    policy.on_assigned(request_like("there", 1), 0)
    for workers in (2, 300):
        calls.clear()
        policy.select(request_like("new", 2), Loads.from_counts([0] * workers), RNG)
        assert len(calls) == 2


def test_a_cached_prefix_counts_by_the_time_that_it_saves() -> None:
    chosen = []
    for per_token in (0.0, 1e-5, 1e-2):
        policy = make_policy("marginal-cost", affinity=0.0, cost={"per_prompt_token_s": per_token})
        assign(policy, [request_like("a", 1), request_like("b", 2)], [1, 1])
        seen = replace(Loads.from_counts([0, 2], [0, 80]), cached_tokens=np.array([0, 32]))
        newcomer = replace(request_like("new", 3), blocks=NO_BLOCKS)
        chosen.append(policy.select(newcomer, seen, RNG).position)
    assert chosen == [0, 0, 1]


@pytest.mark.parametrize("power", [1, 16])
def test_a_prompt_that_arrives_prefilled_costs_no_prefill(power: int) -> None:
    """A step cost of `eldr cost` has a prompt token's time, also where prefill engines are separate."""
    added = []
    for per_token in (0.0, 1e-3):
        cost = replace(COST, per_prompt_token_s=per_token).as_dict()
        policy: Any = make_policy("marginal-cost", affinity=0.0, cost=cost, tail_power=power)
        running = [request_like(str(n), n) for n in range(5)]
        assign(policy, running, [0, 0, 0, 1, 1])
        load = loads(by_worker(running, [0, 0, 0, 1, 1], 2))
        added.append(policy.added_cost(request_like("new", 9), load).tolist())
    assert added[0] == added[1]


class Requests(RuleBasedStateMachine):
    """Requests begin, move and end in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.policy: Any = make_policy("marginal-cost")
        self.held: dict[str, tuple[PlacementRequest, int]] = {}

    @rule(name=st.sampled_from("abcdefgh"), worker=st.integers(0, 3), seed=st.integers(0, 50))
    def place(self, name: str, worker: int, seed: int) -> None:
        self.held[name] = (request_like(name, seed), worker)
        self.policy.on_assigned(self.held[name][0], worker)

    @rule(name=st.sampled_from("abcdefgh"))
    def release(self, name: str) -> None:
        self.held.pop(name, None)
        self.policy.on_finished(name)

    @invariant()
    def unions_are_those_of_the_requests_held(self) -> None:
        for worker in range(len(self.policy.activation.expected_active)):
            requests = [h for h, w in self.held.values() if w == worker]
            assert self.policy.activation.expected_active[worker] == pytest.approx(
                expected_union(requests), rel=0.02, abs=1e-6
            )
        if not self.held:
            assert not self.policy.activation.squared_levels.any()


TestRequests = Requests.TestCase
TestRequests.settings = settings(max_examples=25, stateful_step_count=20)


def deviations(requests: list[PlacementRequest]) -> list[np.ndarray | None]:
    """Return the activation deviation of each request from the mean of those placed before it."""
    deviations_so_far: list[np.ndarray | None] = []
    mean: np.ndarray | None = None
    for n, h in enumerate(requests, start=1):
        p = probability(h)
        deviations_so_far.append(None if mean is None else (p - mean) / np.linalg.norm(p - mean))
        mean = p if mean is None else mean + (p - mean) / min(n, 64)
    return deviations_so_far


def profiles(requests: list[PlacementRequest], positions: list[int], workers: int) -> np.ndarray:
    profile = np.zeros((workers, L * E))
    for worker, deviation in zip(positions, deviations(requests), strict=True):
        if deviation is not None:
            profile[worker] += (deviation - profile[worker]) / 32
    return profile


@settings(max_examples=40)
@given(seed=st.integers(0, 10_000), requests=st.integers(2, 40), strength=st.sampled_from([0.1, 0.5, 1e6]))
def test_a_worker_costs_more_where_other_profiles_fit_better(
    seed: int, requests: int, strength: float
) -> None:
    workers = 4
    policy: Any = make_policy("marginal-cost", cost=COST.as_dict(), affinity=strength)
    rng = np.random.default_rng(seed)
    running = [request_like(f"r{i}", seed + i) for i in range(requests)]
    positions = rng.integers(workers - 1, size=requests).tolist()
    assign(policy, running, positions)
    newcomer, load = request_like("new", seed + 999), loads(by_worker(running, positions, workers))
    deviation = deviations([*running, newcomer])[-1]
    profile = profiles(running, positions, workers)
    length = np.linalg.norm(profile, axis=1)
    similarity = np.divide(profile @ deviation, length, out=np.zeros(workers), where=length > 0)
    added = policy.added_cost(newcomer, load)
    price = added * (1 + strength * (similarity.max() - similarity))
    chosen = policy.select(newcomer, load, rng).position
    # Cells are kept in 8 bits: a similarity is off by up to 1e-3, and its worker's price with it.
    assert price[chosen] <= price.min() * 1.01 + strength * 1e-3 * added[chosen]


def test_profiles_learn_each_request_once_and_only_from_its_own_counts() -> None:
    policy: Any = make_policy("marginal-cost")
    running, positions = [request_like(f"r{i}", i % 7) for i in range(90)], [i % 3 for i in range(90)]
    assign(policy, running, positions)
    profiles_before = policy.profiles.vectors.copy()
    assert profiles_before == pytest.approx(profiles(running, positions, 3), abs=0.01)
    policy.on_assigned(running[-1], 2)  # a repetition, as after a change of workers
    for odd in (None, np.ones((L, E + 1), np.uint32), np.ones(4, np.float32)):
        policy.on_assigned(PlacementRequest("odd", 10, 5, expert_counts=odd), 1)
    assert np.array_equal(policy.profiles.vectors, profiles_before)


def test_measured_counts_replace_predicted_ones_in_everything_learnt() -> None:
    """The result is the same as if the measured counts had been known at placement."""
    states = []
    for predicts in (False, True):
        policy: Any = make_policy("marginal-cost")
        requests, waiting = [request_like(f"r{i}", i % 7) for i in range(150)], []
        for i, true in enumerate(requests):
            known = request_like(true.request_id, 100 + i % 7)
            known = replace(known, predicted=True) if predicts and i % 3 else true
            policy.on_assigned(known, i % 3)
            waiting.append((true, i % 3))
            if len(waiting) > 5 or i == len(requests) - 1:
                for late in waiting[-1:] + waiting[:-1]:
                    policy.on_assigned(*late)
                waiting = []
        states.append((policy.activation.mean, policy.profiles.vectors))
    assert states[1][0] == pytest.approx(states[0][0], abs=1e-5)
    # The mean at the time of a deviation includes predictions.
    assert states[1][1] == pytest.approx(states[0][1], abs=0.02)


@pytest.mark.parametrize(("affinity", "least", "most"), [(0.0, 0.25, 0.6), (0.1, 0.6, 1.0), (0.5, 0.8, 1.0)])
def test_workers_specialise_and_follow_the_traffic(affinity: float, least: float, most: float) -> None:
    """Place four kinds of requests on four workers, ideally one kind on each. Then the kinds change."""
    cost = StepCost(2e-3, 1e-4, 0.0, 2e-5).as_dict()
    policy, rng = make_policy("marginal-cost", cost=cost, affinity=affinity), np.random.default_rng(5)
    placement: list[list[PlacementRequest]] = [[] for _ in range(4)]
    for phase, kinds in enumerate(([1, 2, 3, 4], [11, 12, 13, 14])):
        went = np.zeros((4, 4))
        for n in range(400):
            kind = int(rng.integers(4))
            newcomer = request_like(f"{phase}.{n}", kinds[kind])
            worker = policy.select(newcomer, loads(placement), rng).position
            policy.on_assigned(newcomer, worker)
            placement[worker].append(newcomer)
            went[worker, kind] += n >= 200
            if sum(map(len, placement)) > 24:
                leaves = rng.choice(np.flatnonzero([len(p) for p in placement]))
                policy.on_finished(placement[leaves].pop(0).request_id)
        purity = went.max(axis=1).sum() / went.sum()
        assert least < purity <= most


def test_the_choice_among_very_many_workers_is_nearly_the_best() -> None:
    rng = np.random.default_rng(3)
    tastes = rng.dirichlet(np.full(32, 0.2), size=(6, 16))

    def request(name: str, taste: int) -> PlacementRequest:
        counts = np.stack([rng.multinomial(200, t) for t in tastes[taste]]).astype(np.uint32)
        return PlacementRequest(name, 100, 10, expert_counts=np.minimum(counts, 100))

    policy: Any = make_policy("marginal-cost")
    requests = [request(str(n), int(rng.integers(6))) for n in range(4000)]
    positions = rng.integers(700, size=4000).tolist()
    assign(policy, requests, positions)
    load = loads(by_worker(requests, positions, 700))
    regret = []
    for n in range(20):
        newcomer = request(f"new{n}", n % 6)
        marginal = policy.added_cost(newcomer, load)
        regret.append(marginal[policy.select(newcomer, load, rng).position] / marginal.min() - 1)
    assert policy.activation.p_idle.shape == (700, 16 * 32)
    assert float(np.mean(regret)) < 0.02
    assert max(regret) < 0.1


def request_using(name: str, experts: slice) -> PlacementRequest:
    """Return a request whose tokens all use these of 16 experts of one layer."""
    counts = np.zeros((1, E), np.uint32)
    counts[0, experts] = 100
    return PlacementRequest(name, 100, 10, expert_counts=counts)


def test_all_of_very_many_workers_say_which_batch_is_large() -> None:
    """Worker 0 has the newcomer's experts, and a batch that is large only beside the 31 next cheapest."""
    own, others = slice(0, 4), slice(4, 8)
    cost = StepCost(0.0, 0.0, 0.0, 1e-3).as_dict()
    policy: Any = make_policy("marginal-cost", affinity=0.0, cost=cost)
    sizes = [5] + [1] * 31 + [4] * 481
    positions = np.repeat(np.arange(len(sizes)), sizes).tolist()
    requests = [request_using(str(n), others if w else own) for n, w in enumerate(positions)]
    assign(policy, requests, positions)
    load, newcomer = loads(by_worker(requests, positions, len(sizes))), request_using("new", own)
    assert int(policy.added_cost(newcomer, load).argmin()) == 0
    assert policy.select(newcomer, load, RNG).position == 0


@pytest.mark.parametrize("affinity", [0.0, 0.2, 5.0])
@pytest.mark.parametrize("seed", range(10))
def test_finalists_are_compared_as_all_workers_are(
    affinity: float, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one layer, which the finalists are selected by, the choice is that among all workers."""
    rng, workers = np.random.default_rng(seed), 24
    tastes = rng.dirichlet(np.full(E, 0.3), size=5)

    def drawn(name: str) -> PlacementRequest:
        counts = np.minimum(rng.multinomial(400, tastes[rng.integers(5)]), 200).astype(np.uint32)
        return PlacementRequest(name, 200, 10, expert_counts=counts[None])

    policy: Any = make_policy("marginal-cost", affinity=affinity, cost=COST.as_dict())
    positions = [*range(workers), *rng.integers(workers, size=60).tolist()]
    requests = [drawn(str(n)) for n in range(len(positions))]
    assign(policy, requests, positions)
    load = loads(by_worker(requests, positions, workers))
    for newcomer in (drawn(f"new{n}") for n in range(5)):
        monkeypatch.setattr(marginal_cost, "_MAX_EXACT_WORKERS", workers)
        expected = policy.select(newcomer, load, RNG).position
        monkeypatch.setattr(marginal_cost, "_MAX_EXACT_WORKERS", workers - 1)
        monkeypatch.setattr(marginal_cost, "_FINALISTS", 4)
        assert policy.select(newcomer, load, RNG).position == expected


def test_a_request_without_counts_is_placed_by_load_or_the_mean_of_others() -> None:
    policy = make_policy("marginal-cost")
    bare = PlacementRequest("bare", 10, 5)
    first = policy.select(bare, Loads.from_counts([2, 1]), RNG)
    assert (first.position, first.reason) == (1, "no-counts")
    policy.on_assigned(bare, 1)
    policy.on_assigned(request_like("a", 1), 0)
    later = policy.select(bare, Loads.from_counts([1, 9], [40, 90]), RNG)
    assert (later.position, later.reason) == (0, "marginal-cost")
    for odd in (np.ones((L, E + 1), np.uint32), np.ones(4, np.float32)):
        odd_request = PlacementRequest("odd", 10, 5, expert_counts=odd)
        assert policy.select(odd_request, Loads.from_counts([1, 9], [9, 9]), RNG).position == 0


def test_a_configured_cost_stays_and_a_default_follows_the_engines() -> None:
    live = StepCost(1e-3, 1e-5, 0.0, 1e-5)
    fixed, following = MarginalCost(cost=StepCost().as_dict()), MarginalCost()
    for policy in (fixed, following):
        policy.update_cost_model(live)
    assert (fixed.cost, following.cost) == (StepCost(), live)


def records(cost: StepCost, n: int, noise: float = 0.0) -> tuple[np.ndarray, ...]:
    batch = RNG.integers(1, 40, n)
    kv_tokens = batch * RNG.integers(50, 900, n)
    experts = RNG.integers(20, 300, n)
    seconds = cost.seconds(batch, kv_tokens, experts) * RNG.lognormal(0, noise, n)
    return batch, kv_tokens, experts, seconds


def test_the_fit_recovers_the_cost_of_the_steps() -> None:
    true = StepCost(3e-3, 2e-4, 1e-7, 4e-5)
    sums = StepSums.from_steps(*records(true, 200)) + StepSums.from_steps(*records(true, 300))
    fitted = sums.fit()
    assert fitted.as_dict() == pytest.approx(true.as_dict(), rel=1e-3)
    assert sums.relative_rms_error(fitted) < 1e-3
    noisy = StepSums.from_steps(*records(true, 3000, 0.2))
    again = noisy.fit()
    assert again.per_expert_s == pytest.approx(true.per_expert_s, rel=0.15)
    assert noisy.relative_rms_error(again) == pytest.approx(0.2, abs=0.03)


def test_terms_are_never_negative_and_too_little_data_gives_no_fit() -> None:
    assert StepSums().fit() is None
    assert StepSums.from_steps(*records(StepCost(), 20)).fit() is None
    flat = records(StepCost(5e-3, 0.0, 0.0, 0.0), 500)
    cost = StepSums.from_steps(*flat[:3], flat[3] - 1e-6 * flat[2]).fit()
    assert cost is None or min(cost.as_dict().values()) >= 0


def test_the_prefill_part_of_steps_is_divided_among_prompt_tokens() -> None:
    true = StepCost(3e-3, 2e-4, 1e-7, 4e-5, per_prompt_token_s=6e-5)
    decode = StepSums.from_steps(*records(true, 500))
    batch, kv_tokens, tokens = (RNG.integers(1, most, 90) for most in (40, 9000, 2000))
    usual = decode.active_experts / decode.steps
    halves = [
        StepSums.from_prompts(*columns, true.seconds(columns[0], columns[1], usual, columns[2]))
        for columns in (np.stack([batch, kv_tokens, tokens])[:, part::2] for part in (0, 1))
    ]
    fitted, plain = (decode + halves[0] + halves[1]).fit(), decode.fit()
    assert fitted.per_prompt_token_s == pytest.approx(6e-5, rel=1e-3)
    assert replace(fitted, per_prompt_token_s=0.0) == plain  # decode's terms depend on decode steps alone
    assert (decode + halves[0]).relative_rms_error(fitted) == decode.relative_rms_error(fitted)
    cheap = StepSums.from_prompts(batch, kv_tokens, tokens, np.full(90, 1e-6))
    free = (decode + cheap).fit()
    assert free.per_prompt_token_s == 0


def test_a_batch_between_two_of_the_table_has_a_time_between_theirs() -> None:
    batches = np.array([0, 1, 2, 3, 4, 6, 8, 10])
    added = [
        0,
        0,
        5e-5,
        1e-4,
        3e-3,
        3.5e-3,
        4e-3,
        4.5e-3,
    ]  # batches below the first of the table have its time; the others are on straight lines
    assert JUMPING.seconds(batches, 50, 7) == pytest.approx(COST.seconds(batches, 50, 7) + added)
    assert float(JUMPING.seconds(10, 50, 7)) == pytest.approx(COST.seconds(10, 50, 7) + 4.5e-3)
    assert JUMPING.seconds(batches[:, None], np.arange(3), 7).shape == (8, 3)


def test_a_cost_with_a_table_survives_json() -> None:
    JUMPING.seconds(1, 1, 1)
    assert StepCost(**json.loads(json.dumps(JUMPING.as_dict()))) == JUMPING
    assert StepCost(batch_s={8: 2.0, 2: 1.0}).seconds(5, 0, 0) == StepCost(batch_s={2: 1.0, 8: 2.0}).seconds(
        5, 0, 0
    )
    assert "batch_s" not in COST.as_dict()


def test_a_feature_that_is_always_0_gets_no_cost() -> None:
    features = np.column_stack([np.arange(1.0, 9), np.zeros(8)])
    terms = solve_non_negative(features.T @ features, features.T @ (3 * features[:, 0]))
    assert terms == pytest.approx([3, 0])


def test_an_old_cost_without_prefill_can_be_read() -> None:
    old = {"fixed_s": 1e-3, "per_request_s": 1e-4, "per_kv_token_s": 0.0, "per_expert_s": 1e-5}
    assert StepCost(**old).per_prompt_token_s == 0.0


def test_old_steps_lose_weight() -> None:
    old, new = StepCost(1e-3, 1e-4, 0.0, 9e-5), StepCost(1e-3, 1e-4, 0.0, 1e-5)
    sums = StepSums.from_steps(*records(old, 500))
    for _ in range(8):
        sums = sums.scale(0.3) + StepSums.from_steps(*records(new, 500))
    fitted = sums.fit()
    assert fitted.per_expert_s == pytest.approx(1e-5, rel=0.1)
