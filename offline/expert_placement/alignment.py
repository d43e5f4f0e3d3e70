"""Reordering of a new placement so that the fewest experts move."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike
from scipy.optimize import linear_sum_assignment

from eldr_serve.arrays import Ints
from eldr_serve.experts.parallel.moves import keep_slots, parse_placements


def minimise_moves(old: ArrayLike, new: ArrayLike, ranks: int, *, ranks_alike: bool = False) -> Ints:
    """Return the new placement with its slots ordered so that the fewest experts move.

    An expert that stays on its rank keeps its slot.

    Args:
        old, new: int[L, P], rank-major; -1: an empty slot.
        ranks: G.
        ranks_alike: whether every rank serves any token at the same cost. If so, the new ranks are also
            exchanged so that most experts stay in place.

    Returns:
        int[L, P].

    Raises:
        ValueError: the placements differ in shape, or the slots cannot be split evenly over the ranks.
    """
    before, after = parse_placements(old, new, ranks)
    if ranks_alike:
        after = np.stack([_exchange_ranks(*rows, ranks) for rows in zip(before, after, strict=True)])
    return keep_slots(before, after, ranks)


def _exchange_ranks(old: Ints, new: Ints, ranks: int) -> Ints:
    """Exchange the ranks of a layer's new placement so that most experts stay in place."""
    experts = 1 + int(max(old.max(), new.max()))
    counts = [
        np.stack([np.bincount(row[row >= 0], minlength=experts) for row in side.reshape(ranks, -1)])
        for side in (old, new)
    ]
    shared = np.minimum(counts[0][:, None], counts[1][None, :]).sum(axis=2)
    order = linear_sum_assignment(shared, maximize=True)[1]
    exchanged: Ints = new.reshape(ranks, -1)[order].reshape(-1)
    return exchanged
