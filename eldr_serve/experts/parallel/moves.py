"""Change of an expert placement while an engine serves: slices of moves, each between two steps.

After each slice every expert has a slot, so the engine can run steps between any two slices.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from eldr_serve.arrays import Ints


class Move(NamedTuple):
    """A copy of an expert's weights between slots of a layer; slots are numbered over all ranks."""

    layer: int
    expert: int
    source: int
    target: int


def check_can_begin(ranks: int, engine_ranks: int, slices_left: int) -> None:
    """Raise ValueError if an engine cannot begin a swap to a placement.

    Args:
        ranks, engine_ranks: numbers of ranks of the placement and of the engine.
        slices_left: number of slices that a swap under way has not yet moved.
    """
    if slices_left:
        raise ValueError(f"a swap of expert placements is under way: {slices_left} slices to come")
    if ranks != engine_ranks:
        raise ValueError(f"the placement is for {ranks} ranks, but the engine has {engine_ranks}")


def keep_slots(old: ArrayLike, new: ArrayLike, ranks: int) -> Ints:
    """Reorder the slots within each rank of the new placement so that the fewest experts move.

    Args:
        old, new: int[L, P], rank-major; -1: the slot is empty.
        ranks: G.

    Returns:
        int64[L, P]; an expert that stays on its rank keeps its slot.

    Raises:
        ValueError: the shapes differ, or the slots cannot be split evenly over the ranks.
    """
    before, after = parse_placements(old, new, ranks)
    shape = before.shape
    before, after = (side.reshape(-1, shape[1] // ranks) for side in (before, after))
    return np.stack([_keep_slots_of_rank(*rows) for rows in zip(before, after, strict=True)]).reshape(shape)


def fill_with_replicas(row: ArrayLike, ranks: int) -> Ints:
    """Return a layer's slots, int64[P], with the empty ones filled with the next rank's experts in turn.

    Args:
        row: int[P], rank-major; -1: the slot is empty. Every rank holds an expert.
        ranks: G.
    """
    by_rank = np.asarray(row, np.int64).reshape(ranks, -1)
    filled = by_rank.copy()
    for slots, next_rank in zip(filled, np.roll(by_rank, -1, axis=0), strict=True):
        slots[slots < 0] = np.resize(next_rank[next_rank >= 0], int((slots < 0).sum()))
    return filled.reshape(-1)


def slice_moves(old: ArrayLike, new: ArrayLike, ranks: int, max_moves: int) -> list[list[Move]]:
    """Return the moves from one placement to the next, layer by layer, in slices of `max_moves` or fewer.

    All moves of a slice read the slots' content before the slice. A slice is larger only if experts without
    a second copy are exchanged in a cycle, which must be one slice. A slot that becomes empty gets a move of
    expert -1 from itself.

    Args:
        old, new: int[L, P], the new one from keep_slots; every expert of a layer has a slot in both.
        ranks: G.
        max_moves: maximum moves per slice, 1 or more.

    Raises:
        ValueError: the shapes do not agree, or a layer would have other experts than before.
    """
    before, after = parse_placements(old, new, ranks)
    if max_moves < 1:
        raise ValueError(f"a slice must have 1 move or more, not {max_moves}")
    slices: list[list[Move]] = []
    current: list[tuple[int, int]] = []  # (layer, slot) of the current slice
    content = before.copy()
    for layer in range(len(before)):
        if set(after[layer].tolist()) - {-1} != set(before[layer].tolist()) - {-1}:
            raise ValueError(f"layer {layer} would have other experts than before")
        for group in _write_groups(before[layer], after[layer]):
            if current and len(current) + len(group) > max_moves:
                slices.append(_choose_sources(current, content, after, ranks))
                current = []
            current += [(layer, slot) for slot in group]
    if current:
        slices.append(_choose_sources(current, content, after, ranks))
    return slices


def parse_placements(old: ArrayLike, new: ArrayLike, ranks: int) -> tuple[Ints, Ints]:
    """Return both as int64[L, P]; raise ValueError if shapes differ or ranks cannot have equal slots."""
    before, after = np.asarray(old, np.int64), np.asarray(new, np.int64)
    if before.ndim != 2 or before.shape != after.shape:
        raise ValueError(f"placements of shapes {before.shape} and {after.shape} do not agree")
    if before.shape[1] % ranks:
        raise ValueError(f"{before.shape[1]} slots cannot be split evenly over {ranks} ranks")
    return before, after


def _keep_slots_of_rank(old: Ints, new: Ints) -> Ints:
    """Return the new experts of a rank in an order in which those that remain keep their slots."""
    free_slot = -2  # -1 is an empty slot
    slots = np.full(len(old), free_slot)
    arriving = []
    for expert in new.tolist():
        free = np.flatnonzero((old == expert) & (slots == free_slot))
        if len(free):
            slots[free[0]] = expert
        else:
            arriving.append(expert)
    slots[slots == free_slot] = arriving
    return slots


def _write_groups(old: Ints, new: Ints) -> Iterator[list[int]]:
    """Yield groups of slots of a layer to be written together; after each, every expert has a slot."""
    content = old.copy()
    copies = np.bincount(old[old >= 0], minlength=int(max(old.max(), new.max())) + 1)
    pending = dict.fromkeys(np.flatnonzero(old != new).tolist())
    while pending:
        spare = next((slot for slot in pending if content[slot] < 0 or copies[content[slot]] > 1), None)
        group = [next(iter(pending)) if spare is None else spare]
        # The last slot holds the only copy of its expert: also write the slot that will hold this expert.
        while spare is None:
            successor = next(slot for slot in pending if new[slot] == content[group[-1]])
            if successor == group[0]:
                break
            group.append(successor)
        for slot in group:
            del pending[slot]
            if content[slot] >= 0:
                copies[content[slot]] -= 1
        for slot in group:
            content[slot] = new[slot]
            if new[slot] >= 0:
                copies[new[slot]] += 1
        yield group


def _choose_sources(writes: list[tuple[int, int]], content: Ints, new: Ints, ranks: int) -> list[Move]:
    """Return the moves of a slice, each from its own rank if possible, else from the rank that sends least.

    Updates `content` int[L, P].
    """
    size = content.shape[1] // ranks
    sends = np.zeros(ranks, np.int64)
    moves = []
    for layer, slot in writes:
        expert = int(new[layer, slot])
        if expert < 0:
            moves.append(Move(layer, expert, slot, slot))
            continue
        sources = np.flatnonzero(content[layer] == expert)
        rank = sources // size
        source = sources[np.lexsort((sends[rank], rank != slot // size))[0]]
        sends[source // size] += source // size != slot // size
        moves.append(Move(layer, expert, int(source), slot))
    for move in moves:
        content[move.layer, move.target] = move.expert
    return moves
