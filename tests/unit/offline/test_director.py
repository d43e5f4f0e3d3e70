"""DIRECTOR's placement against brute force, its bounds, and invariants of every placement."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import ArrayLike

from eldr_serve.experts.placement import Topology, hosts_of
from offline.placement.cost import LayerCost
from offline.placement.director import director_placement, placed_work
from offline.placement.rounding import round_in_polytope

COST = LayerCost(fixed_s=1e-4, per_expert_s=2e-6, per_token_s=1e-7, near_byte_s=1e-11, far_byte_s=1e-10)
BYTES = 2000.0


def workload(seed: int, layers: int, ranks: int, experts: int) -> np.ndarray:
    """Return tokens [L, G, E]; some experts are far busier than others, some are idle."""
    rng = np.random.default_rng(seed)
    busy = rng.lognormal(4, 1, (layers, 1, experts)) * (rng.random((layers, 1, experts)) < 0.9)
    return rng.poisson(busy * rng.dirichlet(np.ones(ranks), (layers, experts)).swapaxes(1, 2))


def measured_s(tokens: np.ndarray, placement: np.ndarray, topology: Topology) -> np.ndarray:
    hosts = hosts_of(placement, tokens.shape[2], topology.ranks)
    work = placed_work(tokens, hosts, topology=topology, token_bytes=BYTES)
    return COST.rank_s(work).max(axis=-1)


@settings(max_examples=25)
@given(seed=st.integers(0, 9999), nodes=st.sampled_from([1, 2]), slots=st.sampled_from([2, 3]))
def test_director_is_close_to_the_best_of_all_placements(seed: int, nodes: int, slots: int) -> None:
    topology = Topology(ranks=2, nodes=nodes)
    tokens = workload(seed, 3, 2, 4)
    placed, report = director_placement(tokens, topology=topology, slots=slots, cost=COST, token_bytes=BYTES)
    of_a_rank = list(itertools.combinations_with_replacement(range(4), slots))
    every = [one + two for one, two in itertools.product(of_a_rank, repeat=2) if len({*one, *two}) == 4]
    best = np.min([measured_s(tokens, np.array([p] * 3), topology) for p in every], axis=0)
    assert np.allclose(report.rank_s, measured_s(tokens, placed, topology), rtol=1e-9)
    assert (report.lp_s <= report.bound_s).all()
    assert (report.bound_s <= best * (1 + 1e-9)).all()
    assert (best <= report.rank_s * (1 + 1e-9)).all()
    assert (report.rank_s <= 1.25 * best + 1e-12).all()


@settings(max_examples=25)
@given(st.integers(0, 9999), st.sampled_from([2, 4, 8]), st.sampled_from([1, 2]), st.integers(2, 12))
def test_every_expert_is_placed_within_capacity_and_repair_never_harms(
    seed: int, ranks: int, nodes: int, slots: int
) -> None:
    experts, topology = 2 * ranks - 1, Topology(ranks=ranks, nodes=nodes)
    arguments = {"topology": topology, "slots": slots, "cost": COST, "token_bytes": BYTES}
    tokens, other = (workload(seed + n, 2, ranks, experts) for n in (0, 1))
    placed, report = director_placement(tokens, **arguments, seed=seed)
    assert placed.shape == (2, ranks * slots)
    hosts = hosts_of(placed, experts, ranks)  # raises if an expert is nowhere
    assert (hosts.sum(axis=1) <= slots).all()
    assert np.allclose(report.rank_s, measured_s(tokens, placed, topology))
    assert (report.rank_s >= report.bound_s * (1 - 1e-9)).all()
    repaired, after = director_placement(other, **arguments, start=placed)
    assert np.allclose(after.rank_s, measured_s(other, repaired, topology))


def test_director_is_within_two_percent_of_the_bound_at_scale() -> None:
    rng = np.random.default_rng(0)
    topology = Topology(ranks=32, nodes=4)
    sources = rng.dirichlet(np.full(32, 5.0), (2, 128)).swapaxes(1, 2)
    tokens = 250 * rng.lognormal(0, 1, (2, 1, 128)) * sources
    arguments = {"topology": topology, "slots": 5, "cost": COST, "token_bytes": BYTES}
    placed, report = director_placement(tokens, **arguments)
    assert 0 <= report.gap < 0.02
    repaired, after = director_placement(tokens, **arguments, start=placed)
    assert (after.rank_s <= report.rank_s * (1 + 1e-9)).all()
    assert (repaired != placed).mean() < 0.1


def test_slow_links_keep_tokens_on_their_node_and_loads_without_sources_are_balanced() -> None:
    tokens = np.zeros((1, 4, 8))
    tokens[0, :2, :4] = tokens[0, 2:, 4:] = 100  # each node's tokens need four experts
    slow = COST.model_copy(update={"far_byte_s": 1e-6})
    topology = Topology(ranks=4, nodes=2)
    placed, _ = director_placement(tokens, topology=topology, slots=2, cost=slow, token_bytes=BYTES)
    assert set(placed[0, :4]) in ({0, 1, 2, 3}, set())
    load = np.random.default_rng(0).lognormal(3, 0.5, (2, 24))
    cost = LayerCost(fixed_s=0, per_expert_s=0, per_token_s=1e-6)
    _, report = director_placement(load, topology=Topology(ranks=4), slots=8, cost=cost)
    assert np.allclose(report.lp_s, load.sum(axis=1) / 4 * 1e-6)
    assert report.gap < 0.02


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
