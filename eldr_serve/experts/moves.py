"""From one placement to the next while an engine serves: slices of moves, each between two steps.

After each slice every expert still has a slot, so any step may run on what is there.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

Ints = NDArray[np.int64]


class Move(NamedTuple):
    """An expert's weights, copied from one slot of a layer to another; slots are those of all ranks."""

    layer: int
    expert: int
    source: int
    slot: int


def aligned(old: ArrayLike, new: ArrayLike, ranks: int) -> Ints:
    """The new placement with the slots of each rank in the order in which the fewest experts move.

    Args:
        old, new: int[L, P], rank-major; -1: the slot is empty.
        ranks: G.

    Returns:
        int64[L, P]; an expert that stays on its rank keeps its slot.

    Raises:
        ValueError: placements of different shapes, or slots that do not divide by the ranks.
    """
    before, after = pair(old, new, ranks)
    shape = before.shape
    before, after = (side.reshape(-1, shape[1] // ranks) for side in (before, after))
    return np.stack([_in_place(*rows) for rows in zip(before, after, strict=True)]).reshape(shape)


def sliced(old: ArrayLike, new: ArrayLike, ranks: int, most: int) -> list[list[Move]]:
    """The moves from one placement to the next, layer by layer, in slices of at most `most` moves.

    All moves of a slice read what the slots held before it. A slice is larger only where experts without a
    second copy change places in a ring: those go together. A slot that shall be empty has a move of expert
    -1 from itself.

    Args:
        old, new: int[L, P], aligned; every expert of a layer has a slot in both.
        ranks: G.
        most: moves of a slice, 1 or more.

    Raises:
        ValueError: shapes that do not agree, or a layer with other experts than before.
    """
    before, after = pair(old, new, ranks)
    if most < 1:
        raise ValueError(f"a slice must have 1 move or more, not {most}")
    found: list[list[Move]] = []
    current: list[tuple[int, int]] = []  # (layer, slot) of the slice that is being filled
    held = before.copy()
    for layer in range(len(before)):
        if set(after[layer].tolist()) - {-1} != set(before[layer].tolist()) - {-1}:
            raise ValueError(f"layer {layer} would have other experts than before")
        for unit in _units(before[layer], after[layer]):
            if current and len(current) + len(unit) > most:
                found.append(_with_sources(current, held, after, ranks))
                current = []
            current += [(layer, slot) for slot in unit]
    if current:
        found.append(_with_sources(current, held, after, ranks))
    return found


def pair(old: ArrayLike, new: ArrayLike, ranks: int) -> tuple[Ints, Ints]:
    """Both as int64[L, P]; ValueError if they do not agree or do not divide by the ranks."""
    before, after = np.asarray(old, np.int64), np.asarray(new, np.int64)
    if before.ndim != 2 or before.shape != after.shape:
        raise ValueError(f"placements of shapes {before.shape} and {after.shape} do not agree")
    if before.shape[1] % ranks:
        raise ValueError(f"{before.shape[1]} slots do not divide by {ranks} ranks")
    return before, after


def _in_place(old: Ints, new: Ints) -> Ints:
    """The new experts of a rank; those that it held keep their slots."""
    free_slot = -2  # an empty one has -1
    slots = np.full(len(old), free_slot)
    coming = []
    for expert in new.tolist():
        free = np.flatnonzero((old == expert) & (slots == free_slot))
        if len(free):
            slots[free[0]] = expert
        else:
            coming.append(expert)
    slots[slots == free_slot] = coming
    return slots


def _units(old: Ints, new: Ints) -> Iterator[list[int]]:
    """Slots of a layer to be written, in an order in which each step leaves every expert a slot."""
    held = old.copy()
    copies = np.bincount(old[old >= 0], minlength=int(max(old.max(), new.max())) + 1)
    pending = dict.fromkeys(np.flatnonzero(old != new).tolist())
    while pending:
        spare = next((slot for slot in pending if held[slot] < 0 or copies[held[slot]] > 1), None)
        unit = [next(iter(pending)) if spare is None else spare]
        # Of the last slot's expert there is no other copy: whoever shall hold it is written as well.
        while spare is None:
            heir = next(slot for slot in pending if new[slot] == held[unit[-1]])
            if heir == unit[0]:
                break
            unit.append(heir)
        for slot in unit:
            del pending[slot]
            if held[slot] >= 0:
                copies[held[slot]] -= 1
        for slot in unit:
            held[slot] = new[slot]
            if new[slot] >= 0:
                copies[new[slot]] += 1
        yield unit


def _with_sources(writes: list[tuple[int, int]], held: Ints, new: Ints, ranks: int) -> list[Move]:
    """The moves of a slice, each from its own rank if it can be, else from the rank that sends least.

    `held` int[L, P] is brought up to date.
    """
    size = held.shape[1] // ranks
    sends = np.zeros(ranks, np.int64)
    moves = []
    for layer, slot in writes:
        expert = int(new[layer, slot])
        if expert < 0:
            moves.append(Move(layer, expert, slot, slot))
            continue
        sources = np.flatnonzero(held[layer] == expert)
        rank = sources // size
        source = sources[np.lexsort((sends[rank], rank != slot // size))[0]]
        sends[source // size] += source // size != slot // size
        moves.append(Move(layer, expert, int(source), slot))
    for move in moves:
        held[move.layer, move.slot] = move.expert
    return moves
