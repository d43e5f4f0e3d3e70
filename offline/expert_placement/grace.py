"""GRACE-MoE's placement in the form that engines load: an equal number of slots per rank."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from eldr_serve.arrays import Floats, Ints
from eldr_serve.errors import UserInputError
from eldr_serve.experts.expert_placement import Topology
from offline.expert_placement.grouping import (
    OUR_GROUPING,
    RATIOS,
    Grouping,
    find_knee,
    hierarchical_groups,
    node_groups,
    ratio_curve,
    utilisation,
)
from offline.expert_placement.replication import add_replicas, fill_slots, load_skew


def grace_placement(
    affinity: ArrayLike,
    load: ArrayLike,
    num_physical: int,
    topology: Topology,
    *,
    ratio: float | None = None,
    seed: int = 0,
    grouping: Grouping = OUR_GROUPING,
) -> tuple[Ints, dict[str, Any]]:
    """Place hierarchical groups, replicas of overloaded experts, and spare slots by load (4.1, 4.2).

    The paper's ranks hold different numbers of experts, but all ranks of an engine have the same number of
    slots. So a group has at most as many experts as a rank has slots, a replica needs a free slot, and the
    remaining slots get the experts with the most load per copy (`fill_slots`). Without redundant slots,
    groups are uniform.

    Args:
        affinity: [L, E, E], from `co_activation`.
        load: [L, E], from `expert_load`.
        num_physical: total slots, P.
        ratio: non-uniformity within a node; None: at the knee of U over S, over all layers and nodes.
        grouping: ours, or the paper's form.

    Returns:
        int[L, P], and a report: ratio, U and S (Eq. 1, means over layers), mean and largest load skew
        before replicas, replicas by skew and by filling (means per layer).

    Raises:
        UserInputError: shapes that do not match, or slots that cannot hold the experts.
    """
    pairs, tokens = np.asarray(affinity, np.float64), np.asarray(load, np.float64)
    layers, experts = tokens.shape
    if pairs.shape != (layers, experts, experts):
        raise UserInputError(f"affinity of shape {pairs.shape} does not match load of shape {tokens.shape}")
    capacity = slots_per_rank(experts, num_physical, topology.ranks)
    if ratio is None:
        ratio = knee_ratio(pairs, topology, capacity=capacity, seed=seed, grouping=grouping)
    rows, reports = [], []
    for matrix, counts in zip(pairs, tokens, strict=True):
        primary = hierarchical_groups(
            matrix, topology, ratio=ratio, capacity=capacity, seed=seed, grouping=grouping
        )
        replicated = add_replicas(counts, primary, topology.ranks, capacity=capacity)
        hosts = fill_slots(counts, replicated, capacity)
        rows.append(np.concatenate([np.flatnonzero(column) for column in hosts.T]))
        use, deviation = utilisation(matrix, primary, topology.ranks)
        reports.append(
            (
                use,
                deviation,
                load_skew(counts, primary, topology.ranks),
                int(replicated.sum()) - experts,
                int(hosts.sum() - replicated.sum()),
            )
        )
    names = ("affinity_within_ranks", "size_deviation", "load_skew", "skew_replicas", "spare_replicas")
    means = dict(zip(names, np.mean(reports, axis=0).tolist(), strict=True))
    return np.stack(rows), {"ratio": ratio, **means, "load_skew_max": max(r[2] for r in reports)}


def knee_ratio(
    affinity: Floats,
    topology: Topology,
    *,
    capacity: int | None = None,
    seed: int = 0,
    grouping: Grouping = OUR_GROUPING,
) -> float:
    """Return the non-uniformity ratio at the knee of U over S (Eq. 1), over all layers and nodes."""
    inner = [
        matrix[np.ix_(members, members)]
        for matrix in affinity
        for members in node_groups(matrix, topology, capacity=capacity, seed=seed, grouping=grouping)
    ]
    ranks_per_node = topology.ranks // topology.nodes
    curve = ratio_curve(inner, ranks_per_node, capacity=capacity, seed=seed, grouping=grouping)
    return RATIOS[find_knee(curve)]


def slots_per_rank(num_experts: int, num_physical: int, ranks: int) -> int:
    """Return the number of slots of each rank, P / G.

    Raises:
        UserInputError: the slots cannot be split evenly over the ranks, there are fewer slots than experts,
            or a rank would have more slots than there are experts.
    """
    if num_physical % ranks:
        raise UserInputError(f"{num_physical} slots cannot be split evenly over {ranks} ranks")
    if not num_experts <= num_physical <= num_experts * ranks:
        raise UserInputError(
            f"{num_physical} slots are not from {num_experts} (each expert once) to {num_experts * ranks} "
            "(each expert on every rank)"
        )
    return num_physical // ranks
