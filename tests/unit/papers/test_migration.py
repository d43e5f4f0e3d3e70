"""Execution of migration plans: they give the new placement and read no slot too late."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.papers.migration import Links, MigrationPlan, plan_migration
from eldr_serve.experts.expert_placement import Topology
from offline.expert_placement.alignment import minimise_moves

LINKS = Links(expert_bytes=1e6, near_byte_s=1e-9, far_byte_s=5e-9, commit_s=1e-4)
WINDOWS = (3e-4, 5e-4)


def placement(rng: np.random.Generator, layers: int, experts: int, slots: int) -> np.ndarray:
    all_once = np.arange(experts)
    return np.stack(
        [rng.permutation([*all_once, *rng.integers(experts, size=slots - experts)]) for _ in range(layers)]
    )


def execute(old: np.ndarray, plan: MigrationPlan) -> np.ndarray:
    """Return the slots after the plan's events: reads at the end of transfers, writes when they are ready."""
    slots = old.copy()
    events = [(m.end_s, 0, n) for n, m in enumerate(plan.moves)]
    events += [(m.ready_s, 1, n) for n, m in enumerate(plan.moves)]
    for _, write, n in sorted(events):
        move = plan.moves[n]
        if write:
            slots[move.layer, move.slot] = move.expert
        else:
            assert slots[move.layer, move.source] == move.expert, "read after it was overwritten"
    return slots


def disjoint(spans: list[tuple[float, float]]) -> bool:
    return all(a[1] <= b[0] + 1e-12 for a, b in itertools.pairwise(sorted(spans)))


@settings(max_examples=60)
@given(
    st.integers(0, 9999), st.sampled_from([2, 4]), st.sampled_from([1, 2]), st.integers(0, 2), st.booleans()
)
def test_a_plan_gives_the_new_placement_and_reads_before_it_overwrites(
    seed: int, ranks: int, nodes: int, spare: int, alike: bool
) -> None:
    rng = np.random.default_rng(seed)
    size = 2 + spare
    old, wanted = (placement(rng, 3, 2 * ranks, size * ranks) for _ in range(2))
    new = minimise_moves(old, wanted, ranks, ranks_alike=alike)
    topology = Topology(ranks=ranks, nodes=nodes)
    plan = plan_migration(old, new, topology=topology, links=LINKS, windows_s=WINDOWS)
    assert np.array_equal(execute(old, plan), new)
    assert np.array_equal(plan.placement, new)
    assert len(plan.moves) == (old != new).sum()
    assert plan.cost_s == pytest.approx(LINKS.commit_s * len(plan.moves))
    across = [m for m in plan.moves if m.source // size != m.slot // size]
    for rank in range(ranks):
        assert disjoint([(m.start_s, m.end_s) for m in across if m.source // size == rank])
        assert disjoint([(m.start_s, m.end_s) for m in across if m.slot // size == rank])
        # Each rank has one staging buffer.
        here = [m for m in plan.moves if m.slot // size == rank]
        assert disjoint([(m.end_s, m.ready_s) for m in here if m.ready_s > m.end_s])
    for move in across:
        near = topology.node_of[move.source // size] == topology.node_of[move.slot // size]
        took = LINKS.expert_bytes * (LINKS.near_byte_s if near else LINKS.far_byte_s)
        assert move.end_s - move.start_s == pytest.approx(took)


def test_alignment_moves_as_few_experts_as_the_best_permutation() -> None:
    rng = np.random.default_rng(0)
    for _ in range(20):
        old, new = placement(rng, 1, 6, 9), placement(rng, 1, 6, 9)
        moved = (old != minimise_moves(old, new, 3, ranks_alike=True)).sum()
        rows = new.reshape(3, 3)
        fewest = min(
            sum(
                3 - sum(min((old[0, 3 * g : 3 * g + 3] == e).sum(), (row == e).sum()) for e in range(6))
                for g, row in enumerate(rows[list(order)])
            )
            for order in itertools.permutations(range(3))
        )
        assert moved == fewest


def test_alignment_keeps_ranks_with_empty_slots_in_place() -> None:
    old, new = [[0, 1, 2, -1], [-1, 0, 1, 2]], [[2, -1, 1, 0], [-1, 0, 1, 2]]
    assert minimise_moves(old, new, 2, ranks_alike=True).tolist() == old


def test_layers_without_gain_stay_and_the_largest_gain_moves_first() -> None:
    old, new = np.array([[0, 1, 2, 3]] * 3), np.array([[0, 2, 1, 3]] * 3)
    arguments = {"topology": Topology(ranks=2), "links": LINKS, "steps": 100}
    plan = plan_migration(old, new, **arguments, windows_s=[1e-3], gain_s=[0.0, 1.0, 1e-9])
    assert plan.placement.tolist() == [[0, 1, 2, 3], [0, 2, 1, 3], [0, 1, 2, 3]]
    assert {move.layer for move in plan.moves} == {1}
    plan = plan_migration(old, new, **arguments, windows_s=[1e-3], gain_s=[1, 3, 2])
    assert plan.ready_s[1] < plan.ready_s[2] < plan.ready_s[0]
    # The transfers outlast the batch.
    late = plan_migration(old, new, **arguments, windows_s=[1e-9], gain_s=[1.0] * 3)
    assert not late.moves
    assert late.cost_s == 0
    assert np.array_equal(late.placement, old)
