"""Moves between placements: every intermediate step is a valid placement, and no move is unnecessary."""

from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eldr_serve.experts.parallel.moves import fill_with_replicas, keep_slots, slice_moves

Change = tuple[np.ndarray, np.ndarray, int]


@st.composite
def changes(draw: Any) -> Change:
    """Draw (old int[L, P], new int[L, P], ranks). Every expert is in both, and both may have empty slots."""
    ranks, size, layers = draw(st.integers(1, 4)), draw(st.integers(1, 5)), draw(st.integers(1, 2))
    slots = ranks * size
    experts = draw(st.integers(1, slots))

    def row(spare: st.SearchStrategy[int]) -> list[int]:
        more = draw(st.lists(spare, min_size=slots - experts, max_size=slots - experts))
        return draw(st.permutations([*range(experts), *more]))

    old = [row(st.integers(-1, experts - 1)) for _ in range(layers)]
    new = [row(st.integers(-1, experts - 1)) for _ in range(layers)]
    return np.array(old), np.array(new), ranks


@given(changes(), st.integers(1, 6))
def test_every_step_is_a_valid_placement_and_the_last_is_the_new_one(change: Change, most: int) -> None:
    old, new, ranks = change
    target, placement = keep_slots(old, new, ranks), old.copy()
    for moves in slice_moves(old, target, ranks, most):
        before = placement.copy()
        for move in moves:
            assert move.expert < 0 or before[move.layer, move.source] == move.expert
            assert before[move.layer, move.target] != move.expert
            placement[move.layer, move.target] = move.expert
        assert len(moves) <= most or all((np.bincount(row[row >= 0]) == 1).any() for row in before)
        for row in placement:
            assert set(row[row >= 0]) == set(range(int(new.max()) + 1))
    assert np.array_equal(placement, target)


@given(changes())
def test_alignment_keeps_each_ranks_experts_and_minimises_moves(change: Change) -> None:
    old, new, ranks = change
    aligned = keep_slots(old, new, ranks)
    for before, after, desired in zip(
        *(x.reshape(len(old) * ranks, -1) for x in (old, aligned, new)), strict=True
    ):
        assert Counter(after.tolist()) == Counter(desired.tolist())
        assert (before != after).sum() == (Counter(desired.tolist()) - Counter(before.tolist())).total()


@given(changes())
def test_a_rank_does_not_receive_an_expert_that_it_holds(change: Change) -> None:
    old, new, ranks = change
    size = old.shape[1] // ranks
    for moves in slice_moves(old, keep_slots(old, new, ranks), ranks, 10**6):
        for move in moves:
            rank = move.target // size
            if move.expert in old[move.layer, rank * size : (rank + 1) * size]:
                assert move.source // size == rank


def test_a_cycle_of_single_copies_moves_in_one_step() -> None:
    old, new = np.array([[0, 1, 2, 3]]), np.array([[3, 0, 1, 2]])
    (moves,) = slice_moves(old, new, 4, 1)
    assert sorted((move.expert, move.source, move.target) for move in moves) == [
        (0, 0, 1),
        (1, 1, 2),
        (2, 2, 3),
        (3, 3, 0),
    ]


def test_inconsistent_placements_are_refused() -> None:
    two = np.zeros((1, 2), np.int64)
    for call, sentence in (
        (lambda: keep_slots(two, np.zeros((1, 4)), 2), "do not agree"),
        (lambda: keep_slots(two, two, 3), "cannot be split evenly over 3"),
        (lambda: slice_moves(two, two, 2, 0), "1 move or more"),
        (lambda: slice_moves(two, two + 1, 2, 1), "layer 0 would have other experts"),
    ):
        with pytest.raises(ValueError, match=sentence):
            call()


def test_empty_slots_are_filled_with_the_next_ranks_experts() -> None:
    row = [0, 1, 2, -1, -1, 3, 4, 5, -1, -1]
    filled = fill_with_replicas(row, 2)
    assert filled.tolist() == [0, 1, 2, 3, 4, 3, 4, 5, 0, 1]
    assert fill_with_replicas(filled, 2).tolist() == filled.tolist()
    few = [0, -1, -1, 1, -1, -1]  # fewer experts than slots
    assert fill_with_replicas(few, 2).tolist() == [0, 1, 1, 1, 0, 0]
    moves = [move for part in slice_moves([row], filled[None], 2, 3) for move in part]
    assert sorted(move.target for move in moves) == [3, 4, 8, 9]
