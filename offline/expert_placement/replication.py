"""Replicas of the experts that overload a rank (GRACE-MoE, section 4.2), one layer at a time.

`load` is float[E], tokens of each expert; `primary` int[E], the rank of its first copy.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from eldr_serve.arrays import Floats, Ints
from eldr_serve.errors import UserInputError

Bools = NDArray[np.bool_]


def load_skew(load: Floats, primary: Ints, ranks: int) -> float:
    """Return rho, the load of the heaviest rank over the mean, or 1 if there is no load."""
    by_rank = np.bincount(primary, load, minlength=ranks)
    return float(by_rank.max() / by_rank.mean()) if by_rank.any() else 1.0


def num_replicas(skew: float, ranks: int) -> int:
    """Return the number of replicas of a hot expert beside its first copy (Eq. 2)."""
    return min(max(1, int(skew)), ranks - 1)


def hot_experts(load: Floats, members: Ints, replicas: int) -> Ints:
    """Return the busiest experts of a group that have more than replicas / (1 + replicas) of its load."""
    ordered = members[np.argsort(-load[members], kind="stable")]
    enough = load[members].sum() * replicas / (1 + replicas)
    return ordered[: 1 + int(np.searchsorted(np.cumsum(load[ordered]), enough, side="right"))]


def add_replicas(
    load: Floats, primary: Ints, ranks: int, *, replicas: int | None = None, capacity: int | None = None
) -> Bools:
    """Return bool[E, G], the first copies and those of the heaviest rank's hot experts on the lightest ranks.

    Args:
        replicas: copies of each hot expert; None: by the load skew (Eq. 2). The paper's fixed count is 1.
        capacity: maximum experts per rank, of which the hottest are kept; None: any number.
    """
    hosts: Bools = primary[:, None] == np.arange(ranks)
    if ranks == 1:
        return hosts
    count = num_replicas(load_skew(load, primary, ranks), ranks) if replicas is None else replicas
    by_rank = np.bincount(primary, load, minlength=ranks)
    heaviest = int(by_rank.argmax())
    room = np.full(ranks, len(load) if capacity is None else capacity) - hosts.sum(axis=0)
    lightest = [rank for rank in np.argsort(by_rank, kind="stable") if rank != heaviest and room[rank] > 0]
    for expert in hot_experts(load, np.flatnonzero(primary == heaviest), count):
        for rank in lightest[:count]:
            if room[rank] > 0:
                hosts[expert, rank] = True
                room[rank] -= 1
    return hosts


def fill_slots(load: Floats, hosts: Bools, capacity: int) -> Bools:
    """Return `hosts` with `capacity` experts on every rank, since engines need equally many slots.

    The rank with room and the least predicted load takes the expert with the most load per copy that it
    lacks. This balances tokens, and also gives more of them a local copy.

    Raises:
        UserInputError: more slots than experts, or a rank that holds more than its slots.
    """
    filled = hosts.copy()
    sizes = filled.sum(axis=0)
    if capacity > len(load) or sizes.max() > capacity:
        raise UserInputError(
            f"{capacity} slots per rank do not fit {len(load)} experts, {sizes.max()} of them on one rank"
        )
    while (sizes < capacity).any():
        share = load / filled.sum(axis=1)
        predicted = np.where(sizes < capacity, share @ filled, np.inf)
        rank = int(predicted.argmin())
        expert = int(np.where(filled[:, rank], -np.inf, share).argmax())
        filled[expert, rank] = True
        sizes[rank] += 1
    return filled
