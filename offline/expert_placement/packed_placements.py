"""Placements of experts on ranks that pack them by tokens or activations: EPLB's and ELDR's.

A placement is int[L, P], the logical expert of each physical slot.

Slots are rank-major: with G ranks, rank g holds slots g * P / G up to (g + 1) * P / G.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from eldr_serve.arrays import Floats, Ints
from eldr_serve.errors import UserInputError


def eplb_placement(load: ArrayLike, num_physical: int, *, groups: int, nodes: int, ranks: int) -> Ints:
    """Replicate and pack experts by tokens, as EPLB does, hierarchically if groups divide among nodes.

    First groups of experts are packed onto nodes. Then the busiest experts of each node are replicated until
    its slots are full. Finally the replicas are packed onto the node's ranks.

    Args:
        load: [L, E] tokens of each expert.
        num_physical: total slots, P.
        groups, nodes, ranks: total expert groups, nodes and ranks (GPUs).

    Returns:
        int[L, P].

    Raises:
        UserInputError: the sizes do not divide, or there are fewer slots than experts.
    """
    weight = _check_activity(load)
    num_experts = weight.shape[1]
    if num_physical < num_experts:
        raise UserInputError(f"{num_physical} slots cannot hold {num_experts} experts")
    if groups % nodes:
        groups, nodes = 1, 1  # groups do not divide among nodes: pack all experts together
    for what, total, parts in (
        ("experts", num_experts, groups),
        ("groups", groups, nodes),
        ("ranks", ranks, nodes),
        ("slots", num_physical, ranks),
    ):
        if parts < 1 or total % parts:
            raise UserInputError(f"{total} {what} cannot be split evenly into {parts} parts")
    return np.stack([_eplb_layer(row, num_physical, groups, nodes, ranks) for row in weight])


def activation_probability(load: Floats, steps: int, batch: int) -> Floats:
    """Return [L, E], the probability that a decode step of `batch` tokens activates the expert.

    Args:
        load: [L, E] tokens of each expert in all steps of single requests.
        steps: number of these steps.
    """
    probability: Floats = 1 - (1 - load / steps) ** batch
    return probability


def activation_placement(activation: ArrayLike, ranks: int) -> Ints:
    """Return ELDR's placement for one decode worker (paper, section 5): no replicas, equal numbers per rank.

    The next most active expert goes to the rank with the least expected activation that has a slot.

    Args:
        activation: [L, E] probability that a decode step of the worker's cluster activates the expert.

    Returns:
        int[L, E].
    """
    activity = _check_activity(activation)
    if ranks < 1 or activity.shape[1] % ranks:
        raise UserInputError(f"{activity.shape[1]} experts cannot be split evenly over {ranks} ranks")
    return np.stack([np.concatenate(_pack(row, ranks)) for row in activity])


def _check_activity(values: ArrayLike) -> Floats:
    array = np.asarray(values, np.float64)
    if array.ndim != 2 or not array.size or not np.isfinite(array).all() or array.min() < 0:
        raise UserInputError("loads and activations must be a [layers, experts] array, finite and 0 or more")
    return array


def _pack(weight: Floats, packs: int) -> list[Ints]:
    """Return the items of each pack, equally many. The heaviest go first, to the lightest pack with room."""
    room = len(weight) // packs
    chosen: list[list[int]] = [[] for _ in range(packs)]
    total = [0.0] * packs
    for item in np.argsort(-weight, kind="stable").tolist():
        pack = min((p for p in range(packs) if len(chosen[p]) < room), key=lambda p: total[p])
        chosen[pack].append(item)
        total[pack] += float(weight[item])
    return [np.array(items, np.int64) for items in chosen]


def _replicate(weight: Floats, slots: int) -> tuple[Ints, Ints]:
    """Return (expert of each slot, replicas of each expert). Add replicas where a replica has most load."""
    count = np.ones(len(weight), np.int64)
    experts = list(range(len(weight)))
    for _ in range(slots - len(weight)):
        busiest = int((weight / count).argmax())
        experts.append(busiest)
        count[busiest] += 1
    return np.array(experts, np.int64), count


def _eplb_layer(weight: Floats, slots: int, groups: int, nodes: int, ranks: int) -> Ints:
    size = len(weight) // groups
    groups_by_node = _pack(weight.reshape(groups, size).sum(axis=1), nodes)
    packs: list[Ints] = []
    for members in groups_by_node:
        experts = (members[:, None] * size + np.arange(size)).reshape(-1)
        local, count = _replicate(weight[experts], slots // nodes)
        share = (weight[experts] / count)[local]
        packs += [experts[local[pack]] for pack in _pack(share, ranks // nodes)]
    return np.concatenate(packs)
