"""Groups of experts that are used together, on nodes and on their ranks (GRACE-MoE, section 4.1).

`affinity` is float[n, n], symmetric, 0 or more, 0 on the diagonal; a grouping is int[n], the group of each
expert.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from sklearn.cluster import SpectralClustering

from eldr_serve.arrays import Floats, Ints
from eldr_serve.errors import UserInputError
from eldr_serve.experts.expert_placement import Topology

RATIOS = tuple(tenths / 10 for tenths in range(11))


def spectral_groups(
    affinity: Floats, groups: int, *, labels: Literal["cluster_qr", "kmeans"] = "cluster_qr", seed: int = 0
) -> Ints:
    """Group experts fully non-uniformly: affinity determines the sizes.

    Pivoted QR assigns the `labels` by default, k-means in the paper's form (`grace_paper`).
    """
    n = len(affinity)
    if groups >= n or groups == 1:
        return np.arange(n) % groups
    # The embedding needs a connected graph, even if an expert was never seen.
    connected = affinity + 1e-6 * max(float(affinity.mean()), 1e-6)
    clustering = SpectralClustering(groups, affinity="precomputed", assign_labels=labels, random_state=seed)
    group_of: Ints = clustering.fit_predict(connected).astype(np.int64)
    return group_of


def check_sizes(n: int, groups: int, low: int, high: int) -> None:
    """Raise UserInputError if n experts cannot be divided into groups of `low` to `high`."""
    if not groups * low <= n <= groups * high:
        raise UserInputError(f"{n} experts cannot be divided into {groups} groups of {low} to {high}")


def bounded_groups(affinity: Floats, initial: Ints, groups: int, low: int, high: int) -> Ints:
    """Move experts until each group has `low` to `high` of them (Algorithm 2).

    The members with the least affinity leave a group that is too large, for the group where they add most
    affinity. A group that is too small gets the experts of other groups that lose the least affinity. The
    paper's algorithm compares the groups' totals after the move, which favours large groups. Here the gain is
    the added affinity alone.

    Raises:
        UserInputError: bounds that no grouping of n experts meets.
    """
    check_sizes(len(affinity), groups, low, high)
    label = np.array(initial)
    size = np.bincount(label, minlength=groups)
    gain = affinity @ np.eye(groups)[label]  # [n, groups], affinity of each expert to each group

    def move(expert: int, group: int) -> None:
        gain[:, label[expert]] -= affinity[:, expert]
        gain[:, group] += affinity[:, expert]
        size[label[expert]] -= 1
        size[group] += 1
        label[expert] = group

    for group in range(groups):
        members = np.flatnonzero(label == group)
        for expert in members[np.argsort(gain[members, group], kind="stable")][: max(0, len(members) - high)]:
            move(int(expert), int(np.where(size < high, gain[expert], -np.inf).argmax()))
    while (size < low).any():
        movable = np.flatnonzero(size[label] > low)
        needy = np.flatnonzero(size < low)
        loss = gain[movable[:, None], needy[None, :]] - gain[movable, label[movable]][:, None]
        best = divmod(int(loss.argmax()), len(needy))
        move(int(movable[best[0]]), int(needy[best[1]]))
    return label


@dataclass(frozen=True)
class Grouping:
    """A form of controlled non-uniform grouping; the default is ours, and PAPER_GROUPING is the paper's.

    Attributes:
        labels: how spectral clustering assigns groups.
        bound: moves experts until all groups have a size within bounds; called as `bounded_groups` is.
        least_slack: experts by which a group's size may differ at ratio 0.
    """

    labels: Literal["cluster_qr", "kmeans"] = "cluster_qr"
    bound: Callable[[Floats, Ints, int, int, int], Ints] = bounded_groups
    least_slack: int = 0


OUR_GROUPING = Grouping()


def size_bounds(
    n: int, groups: int, ratio: float, capacity: int | None = None, *, least_slack: int = 0
) -> tuple[int, int]:
    """Return the bounds of a group's size at non-uniformity `ratio`: E - d to E + d, d = E * ratio.

    At ratio 0, d is `least_slack`. No group exceeds `capacity`.

    Raises:
        UserInputError: fewer experts than groups, or more than the groups' capacity.
    """
    check_sizes(n, groups, 1, capacity or n)
    ideal = n // groups
    slack = max(1, round(ideal * ratio)) if ratio > 0 else least_slack
    high = max(ideal + slack, -(-n // groups))
    return max(1, ideal - slack), min(high, capacity or n)


def utilisation(affinity: Floats, label: Ints, groups: int) -> tuple[float, float]:
    """Return (U, S) of Eq. 1: share of affinity within groups, and standard deviation of their sizes."""
    within = float(affinity[label[:, None] == label[None, :]].sum())
    size = np.bincount(label, minlength=groups)
    return within / max(float(affinity.sum()), 1e-12), float(size.std())


def ratio_curve(
    affinities: Sequence[Floats],
    groups: int,
    *,
    ratios: Sequence[float] = RATIOS,
    capacity: int | None = None,
    seed: int = 0,
    grouping: Grouping = OUR_GROUPING,
) -> Floats:
    """Return float[len(ratios), 2]: (U, S) at each non-uniformity ratio, mean over the layers' affinities."""
    curve = []
    initial = [spectral_groups(a, groups, labels=grouping.labels, seed=seed) for a in affinities]
    for ratio in ratios:
        points = []
        for affinity, start in zip(affinities, initial, strict=True):
            n, slack = len(affinity), grouping.least_slack
            bounds = size_bounds(n, groups, ratio, capacity, least_slack=slack)
            points.append(utilisation(affinity, grouping.bound(affinity, start, groups, *bounds), groups))
        curve.append(np.mean(points, axis=0))
    return np.array(curve)


def find_knee(curve: Floats) -> int:
    """Return the index of the point of U over S furthest above the line between the ends, or 0 if flat."""
    spread = np.ptp(curve, axis=0)
    if not spread.all():
        return 0
    use, deviation = ((curve - curve.min(axis=0)) / spread).T
    return int((use - deviation).argmax())


def hierarchical_groups(
    affinity: Floats,
    topology: Topology,
    *,
    ratio: float,
    capacity: int | None = None,
    seed: int = 0,
    grouping: Grouping = OUR_GROUPING,
) -> Ints:
    """Return int[n], the rank of each expert. Groups are fully non-uniform across nodes, controlled within.

    Args:
        ratio: non-uniformity within a node.
        capacity: maximum experts per rank; None: any number.
        grouping: the form, ours or the paper's.

    Raises:
        UserInputError: fewer experts than ranks, or more than their capacity.
    """
    rank = np.empty(len(affinity), np.int64)
    ranks_per_node = topology.ranks // topology.nodes
    nodes = node_groups(affinity, topology, capacity=capacity, seed=seed, grouping=grouping)
    for node, members in enumerate(nodes):
        inner = affinity[np.ix_(members, members)]
        bounds = size_bounds(len(members), ranks_per_node, ratio, capacity, least_slack=grouping.least_slack)
        initial = spectral_groups(inner, ranks_per_node, labels=grouping.labels, seed=seed)
        rank[members] = node * ranks_per_node + grouping.bound(inner, initial, ranks_per_node, *bounds)
    return rank


def node_groups(
    affinity: Floats,
    topology: Topology,
    *,
    capacity: int | None = None,
    seed: int = 0,
    grouping: Grouping = OUR_GROUPING,
) -> list[Ints]:
    """Return the experts of each node: non-uniform, but with one to `capacity` experts per rank."""
    n, ranks_per_node = len(affinity), topology.ranks // topology.nodes
    initial = spectral_groups(affinity, topology.nodes, labels=grouping.labels, seed=seed)
    max_size = n if capacity is None else ranks_per_node * capacity
    label = grouping.bound(affinity, initial, topology.nodes, ranks_per_node, max_size)
    return [np.flatnonzero(label == node) for node in range(topology.nodes)]
