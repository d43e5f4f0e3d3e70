"""DIRECTOR's placement against brute force, its bounds, and invariants of every placement."""

import itertools
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import ArrayLike

from eldr_serve.experts.expert_placement import Topology, hosts_of
from offline.expert_placement import director, director_paper, relaxation
from offline.expert_placement.cost import LayerCost
from offline.expert_placement.director import director_placement, renewed_placement
from offline.expert_placement.director_paper import (
    director_paper_placement,
    round_with_scales,
    theorem_slack_s,
    two_maxima_s,
)
from offline.expert_placement.rounding import round_in_polytope
from offline.expert_placement.workload import placed_work, placement_time_s

COST = LayerCost(fixed_s=1e-4, per_expert_s=2e-6, per_token_s=1e-7, near_byte_s=1e-11, far_byte_s=1e-10)
BYTES = 2000.0


def workload(seed: int, layers: int, ranks: int, experts: int) -> np.ndarray:
    """Return tokens [L, G, E]. Some experts are far busier than others, some are idle."""
    rng = np.random.default_rng(seed)
    busy = rng.lognormal(4, 1, (layers, 1, experts)) * (rng.random((layers, 1, experts)) < 0.9)
    return rng.poisson(busy * rng.dirichlet(np.ones(ranks), (layers, experts)).swapaxes(1, 2))


def measured_s(tokens: np.ndarray, placement: np.ndarray, topology: Topology) -> np.ndarray:
    hosts = hosts_of(placement, tokens.shape[2], topology.ranks)
    work = placed_work(tokens, hosts, topology=topology, token_bytes=BYTES)
    return COST.rank_s(work).max(axis=-1)


@settings(max_examples=12)
@given(seed=st.integers(0, 9999), nodes=st.sampled_from([1, 2]), slots=st.sampled_from([2, 3]))
def test_director_is_close_to_the_best_of_all_placements(seed: int, nodes: int, slots: int) -> None:
    topology = Topology(ranks=2, nodes=nodes)
    tokens = workload(seed, 3, 2, 4)
    rows, report = director_placement(tokens, topology=topology, slots=slots, cost=COST, token_bytes=BYTES)
    of_a_rank = list(itertools.combinations_with_replacement(range(4), slots))
    every = [one + two for one, two in itertools.product(of_a_rank, repeat=2) if len({*one, *two}) == 4]
    best = np.min([measured_s(tokens, np.array([p] * 3), topology) for p in every], axis=0)
    assert np.allclose(report.rank_s, measured_s(tokens, rows, topology), rtol=1e-9)
    assert (report.lp_s <= report.bound_s).all()
    assert (report.bound_s <= best * (1 + 1e-9)).all()
    assert (best <= report.rank_s * (1 + 1e-9)).all()
    assert (report.rank_s <= 1.25 * best + 1e-12).all()


@settings(max_examples=10)
@given(st.integers(0, 9999), st.sampled_from([2, 4, 8]), st.sampled_from([1, 2]), st.integers(2, 12))
def test_every_expert_is_placed_within_capacity_and_repair_never_harms(
    seed: int, ranks: int, nodes: int, slots: int
) -> None:
    experts, topology = 2 * ranks - 1, Topology(ranks=ranks, nodes=nodes)
    arguments = {"topology": topology, "slots": slots, "cost": COST, "token_bytes": BYTES}
    tokens, other = (workload(seed + n, 2, ranks, experts) for n in (0, 1))
    rows, report = director_placement(tokens, **arguments, seed=seed)
    assert rows.shape == (2, ranks * slots)
    hosts = hosts_of(rows, experts, ranks)  # this raises an error if an expert is nowhere
    assert (hosts.sum(axis=1) <= slots).all()
    assert np.allclose(report.rank_s, measured_s(tokens, rows, topology))
    assert (report.rank_s >= report.bound_s * (1 - 1e-9)).all()
    repaired, after = director_placement(other, **arguments, start=rows)
    assert np.allclose(after.rank_s, measured_s(other, repaired, topology))


def test_director_is_within_two_percent_of_the_bound_at_scale() -> None:
    rng = np.random.default_rng(0)
    topology = Topology(ranks=32, nodes=4)
    sources = rng.dirichlet(np.full(32, 5.0), (2, 128)).swapaxes(1, 2)
    tokens = 250 * rng.lognormal(0, 1, (2, 1, 128)) * sources
    arguments = {"topology": topology, "slots": 5, "cost": COST, "token_bytes": BYTES}
    rows, report = director_placement(tokens, **arguments)
    assert 0 <= report.excess_over_lp < 0.02
    repaired, after = director_placement(tokens, **arguments, start=rows)
    assert (after.rank_s <= report.rank_s * (1 + 1e-9)).all()
    assert (repaired != rows).mean() < 0.1


def test_slow_links_keep_tokens_on_their_node_and_loads_without_sources_are_balanced() -> None:
    tokens = np.zeros((1, 4, 8))
    tokens[0, :2, :4] = tokens[0, 2:, 4:] = 100  # each node's tokens need four experts
    slow = COST.model_copy(update={"far_byte_s": 1e-6})
    topology = Topology(ranks=4, nodes=2)
    rows, _ = director_placement(tokens, topology=topology, slots=2, cost=slow, token_bytes=BYTES)
    assert set(rows[0, :4]) in ({0, 1, 2, 3}, set())
    load = np.random.default_rng(0).lognormal(3, 0.5, (2, 24))
    cost = LayerCost(fixed_s=0, per_expert_s=0, per_token_s=1e-6)
    _, report = director_placement(load, topology=Topology(ranks=4), slots=8, cost=cost)
    assert np.allclose(report.lp_s, load.sum(axis=1) / 4 * 1e-6)
    assert report.excess_over_lp < 0.02


@settings(max_examples=60)
@given(seed=st.integers(0, 9999), experts=st.integers(2, 12), columns=st.integers(2, 4))
def test_rounding_keeps_experts_whole_and_slots_within_bounds(seed: int, experts: int, columns: int) -> None:
    rng = np.random.default_rng(seed)
    copies = rng.integers(1, 3, experts)
    fractions = rng.dirichlet(np.ones(columns), experts) * copies[:, None]
    room = np.ceil(fractions.sum(axis=0)).astype(int) + rng.integers(0, 2, columns)
    price = rng.random((experts, columns))
    budget = float((fractions * price).sum(axis=0).max())
    whole = round_in_polytope(fractions, price, room, budget, rng)
    assert (whole >= np.floor(fractions + 1e-7)).all()
    assert (whole <= np.ceil(fractions - 1e-7)).all()
    assert np.array_equal(whole.sum(axis=1), copies)
    assert (whole.sum(axis=0) <= room).all()


def count_calls(monkeypatch: pytest.MonkeyPatch, *functions: tuple[Any, str]) -> Counter[str]:
    """Count the calls of each function (module, name), which still runs."""
    calls: Counter[str] = Counter()

    def watch(module: Any, name: str) -> None:
        original = getattr(module, name)

        def call(*args: Any, **options: Any) -> Any:
            calls[name] += 1
            return original(*args, **options)

        monkeypatch.setattr(module, name, call)

    for module, name in functions:
        watch(module, name)
    return calls


@pytest.mark.parametrize(("ranks", "nodes", "experts"), [(2, 1, 8), (8, 1, 128), (8, 2, 16), (4, 4, 512)])
@pytest.mark.parametrize("byte_s", [0, 1e-11])
def test_each_layer_is_solved_and_rounded_even_if_ranks_look_alike(
    ranks: int, nodes: int, experts: int, byte_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = count_calls(monkeypatch, (relaxation, "linprog"), (director, "round_in_polytope"))
    cost = LayerCost(fixed_s=0, per_expert_s=1e-6, per_token_s=1e-7, near_byte_s=byte_s, far_byte_s=byte_s)
    tokens = workload(3, 2, ranks, experts)
    topology = Topology(ranks=ranks, nodes=nodes)
    arguments = {"topology": topology, "slots": experts // ranks + 1, "cost": cost, "token_bytes": BYTES}
    rows, _ = director_placement(tokens, **arguments)
    assert calls["linprog"] == 2
    assert calls["round_in_polytope"] >= 2
    calls.clear()
    renewed_placement(tokens, rows, **arguments)
    assert calls["linprog"] == 4  # a new placement, and the bound of a repair
    assert calls["round_in_polytope"] >= 2


@settings(max_examples=8)
@given(seed=st.integers(0, 9999), nodes=st.sampled_from([1, 2]))
def test_a_renewed_placement_is_no_slower_and_its_gain_is_the_costs(seed: int, nodes: int) -> None:
    topology = Topology(ranks=4, nodes=nodes)
    arguments = {"topology": topology, "cost": COST, "token_bytes": BYTES}
    old, new = workload(seed, 2, 4, 10), workload(seed + 1, 2, 4, 10)
    start, _ = director_placement(old, slots=4, **arguments)
    placed, gain = renewed_placement(new, start, slots=4, **arguments)
    before, after = (placement_time_s(new, rows, **arguments) for rows in (start, placed))
    assert gain == pytest.approx(1 - after / before)
    assert gain >= 0
    assert (placed == start).all() == (gain == 0)


@settings(max_examples=8)
@given(seed=st.integers(0, 9999), ranks=st.sampled_from([2, 4]), slots=st.integers(4, 6))
def test_the_papers_algorithm_places_each_expert_once_near_its_budget(
    seed: int, ranks: int, slots: int
) -> None:
    topology, experts = Topology(ranks=ranks, nodes=2), 4 * ranks - 1
    tokens = workload(seed, 2, ranks, experts)
    rows, report = director_paper_placement(
        tokens, topology=topology, slots=slots, cost=COST, token_bytes=BYTES, seed=seed
    )
    hosts = hosts_of(rows, experts, ranks)
    assert rows.shape == (2, ranks * slots)
    assert (hosts.sum(axis=1) <= slots).all()
    if hosts.any(axis=1).all() and hosts.sum() == hosts.shape[0] * experts:
        assert report.reached_s == pytest.approx(
            sum(paper_s(layer) for layer in zip(tokens, hosts, strict=True))
        )
    assert report.lp_solves >= 6
    assert report.reached_s >= report.budget_s * 0.99 * (1 - 1e-6)  # the bisection's width below the budget
    assert report.theorem_s >= report.budget_s


def paper_s(layer: tuple[np.ndarray, np.ndarray]) -> float:
    """Return (2) + (4) of one layer, tokens [G, E] and hosts [E, G], on two nodes; replicas share evenly."""
    tokens, hosts = layer
    ranks = len(tokens)
    shared = tokens / hosts.sum(axis=1)
    compute = [
        sum(COST.per_token_s * shared[:, e].sum() + COST.per_expert_s * tokens[:, e].any() for e in experts)
        for experts in map(np.flatnonzero, hosts.T)
    ]
    sent = np.zeros(ranks)
    for source, target in itertools.permutations(range(ranks), 2):
        near = source * 2 // ranks == target * 2 // ranks
        byte_s = COST.near_byte_s if near else COST.far_byte_s
        sent[source] += byte_s * BYTES * shared[source, hosts[:, target]].sum()
    return max(compute) + sent.max()


@settings(max_examples=8)
@given(seed=st.integers(0, 9999), slots=st.integers(4, 6))
def test_the_papers_latency_counts_replicas_and_is_above_the_papers_lp(seed: int, slots: int) -> None:
    topology = Topology(ranks=4, nodes=2)
    arguments = {"topology": topology, "cost": COST, "token_bytes": BYTES}
    tokens = workload(seed, 2, 4, 15)
    rows, _ = director_placement(tokens, slots=slots, **arguments)
    latency_s = two_maxima_s(tokens, rows, **arguments)
    layers = zip(tokens, hosts_of(rows, 15, 4), strict=True)
    assert latency_s == pytest.approx(sum(map(paper_s, layers)))
    _, report = director_paper_placement(tokens, slots=slots, **arguments)
    assert report.infeasible_s <= latency_s * (1 + 1e-6)


def test_the_theorem_allows_more_the_more_variables_are_fractional() -> None:
    assert theorem_slack_s(2.0, 0) == 0
    assert theorem_slack_s(2.0, 200) == pytest.approx(0.1 * 200)  # gamma, and the root of 200 steps times 200
    assert theorem_slack_s(1.0, 50) == pytest.approx(0.1 * 50)
    arguments = {"topology": Topology(ranks=1), "slots": 6, "cost": COST}
    _, report = director_paper_placement(workload(1, 2, 1, 6), **arguments)  # nothing to round
    assert report.theorem_s == report.budget_s == pytest.approx(report.reached_s)


def test_the_budget_is_searched_by_lps_over_all_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = count_calls(monkeypatch, (director_paper, "linprog"), (director_paper, "round_with_scales"))
    tokens = workload(1, 3, 2, 6)
    tries: list[bool] = []
    _, report = director_paper_placement(
        tokens,
        topology=Topology(ranks=2),
        slots=3,
        cost=COST,
        on_solve=lambda budget_s, feasible: tries.append(feasible),
    )
    assert calls == {"linprog": report.lp_solves, "round_with_scales": 3}
    assert len(tries) == report.lp_solves
    assert set(tries) == {True, False}
    # Without traffic and with whole shares allowed to split, the least budget is the mean load.
    work = COST.per_token_s * tokens.sum() + COST.per_expert_s * (tokens.sum(axis=1) > 0).sum()
    assert work / 2 <= report.budget_s * (1 + 1e-6) <= 1.02 * work / 2


@settings(max_examples=12)
@given(seed=st.integers(0, 9999), experts=st.integers(2, 16), ranks=st.integers(2, 5))
def test_rounding_with_scales_keeps_the_slots(seed: int, experts: int, ranks: int) -> None:
    rng = np.random.default_rng(seed)
    share = rng.dirichlet(np.full(ranks, 0.7), experts)
    slots = int(np.ceil(share.sum(axis=0).max()))
    chosen = round_with_scales(share, slots, rng)
    assert np.bincount(chosen, minlength=ranks).max() <= slots
    assert (share[np.arange(experts), chosen] > 0).all()


@pytest.mark.parametrize(
    ("load", "slots", "start", "word"),
    [
        (np.ones((1, 9)), 4, None, "9 experts"),
        (np.ones((1, 3, 9)), 5, None, "2 ranks"),
        ([[1, float("nan")]], 1, None, "finite"),
        ([[1, -1]], 1, None, "0 or more"),
        ([[1, 1]], 1, [[0, 1, 1]], "start"),
        ([[1, 1]], 1, [[0, 2]], "outside"),
    ],
)
def test_bad_input_is_refused(load: ArrayLike, slots: int, start: ArrayLike | None, word: str) -> None:
    arguments = {"topology": Topology(ranks=2), "slots": slots, "cost": COST}
    with pytest.raises(ValueError, match=word):
        director_placement(load, **arguments, start=start)
