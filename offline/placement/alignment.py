"""The order of a new placement's slots, and of its ranks, in which the fewest experts move."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.optimize import linear_sum_assignment

from eldr_serve.experts.moves import aligned as in_place
from eldr_serve.experts.moves import pair

Ints = NDArray[np.int64]


def aligned(old: ArrayLike, new: ArrayLike, ranks: int, *, alike: bool = False) -> Ints:
    """The new placement with its slots in the order in which the fewest experts move.

    An expert that stays on its rank keeps its slot. With `alike`, ranks that serve any token as cheaply
    as each other, the new ranks are also renamed: the assignment that keeps most experts where they are.

    Returns:
        int[L, P].

    Raises:
        ValueError: placements of different shapes, or slots that do not divide by the ranks.
    """
    before, after = pair(old, new, ranks)
    if alike:
        after = np.stack([_renamed(*rows, ranks) for rows in zip(before, after, strict=True)])
    return in_place(before, after, ranks)


def _renamed(old: Ints, new: Ints, ranks: int) -> Ints:
    """The ranks of a layer's new placement, exchanged so that most experts stay where they are."""
    experts = 1 + int(max(old.max(), new.max()))
    counts = [
        np.stack([np.bincount(row, minlength=experts) for row in side.reshape(ranks, -1)])
        for side in (old, new)
    ]
    shared = np.minimum(counts[0][:, None], counts[1][None, :]).sum(axis=2)
    order = linear_sum_assignment(shared, maximize=True)[1]
    renamed: Ints = new.reshape(ranks, -1)[order].reshape(-1)
    return renamed
