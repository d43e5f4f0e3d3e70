"""GRACE-MoE's grouping and polling weights as the paper writes them, to compare with ours.

Ours is in `grouping` and `locality`; `eldr reproduce grace forms` compares both.
"""

from __future__ import annotations

import numpy as np

from eldr_serve.arrays import Floats, Ints
from offline.expert_placement.grouping import Grouping, check_sizes
from offline.expert_placement.locality import Bools


def controlled_groups(affinity: Floats, initial: Ints, groups: int, low: int, high: int) -> Ints:
    """Move experts until each group has `low` to `high` of them, by the groups' total affinity (Algorithm 2).

    Arguments and errors are those of `bounded_groups`. An expert goes to the group whose total affinity
    (Algorithm 1) with the expert is the highest, so large groups attract most experts.
    """
    check_sizes(len(affinity), groups, low, high)
    members = [list(np.flatnonzero(initial == group)) for group in range(groups)]

    def affinity_within(expert: int, group: int) -> float:
        return float(affinity[expert, members[group]].sum())

    def total_with(expert: int, group: int) -> float:
        joined = [*members[group], expert]
        return float(affinity[np.ix_(joined, joined)].sum())

    def assign(expert: int, candidates: list[int]) -> None:
        members[max(candidates, key=lambda group: total_with(expert, group))].append(expert)

    rest: list[int] = []
    for group in range(groups):
        ranked = sorted(members[group], key=lambda expert: affinity_within(expert, group), reverse=True)
        members[group], rest = ranked[:high], rest + ranked[high:]
    for expert in rest:
        assign(expert, [group for group in range(groups) if len(members[group]) < high])
    weakest: list[int] = []
    for _ in range(sum(max(0, low - len(group)) for group in members)):
        donors = [(g, expert) for g in range(groups) if len(members[g]) > low for expert in members[g]]
        group, expert = min(donors, key=lambda donor: affinity_within(donor[1], donor[0]))
        members[group].remove(expert)
        weakest.append(expert)
    for expert in weakest:
        assign(expert, [group for group in range(groups) if len(members[group]) < low])
    label = np.empty(len(affinity), np.int64)
    for group, experts in enumerate(members):
        label[experts] = group
    return label


PAPER_GROUPING = Grouping(labels="kmeans", bound=controlled_groups, least_slack=1)


def polling_weights_as_written(load: Floats, primary: Ints, hosts: Bools) -> Floats:
    """Return float[G], the inverse of each rank's predicted load as Equation 3 is written, for one layer.

    Each rank with replicas gets W_max / (1 + n), the load of the whole heaviest group divided by its
    instances, though only the replicated experts' load W_r leaves that group.

    Args:
        load: [E], tokens of each expert.
        primary: [E], the rank of each expert's first copy.
        hosts: [E, G], with the replicas of the heaviest rank's experts.
    """
    ranks = hosts.shape[1]
    predicted = np.bincount(primary, load, minlength=ranks).astype(np.float64)
    replicated = hosts.sum(axis=1) > 1
    if replicated.any():
        heaviest = int(primary[replicated][0])
        helpers = np.flatnonzero(hosts[replicated].any(axis=0) & (np.arange(ranks) != heaviest))
        instance = predicted[heaviest] / (1 + len(helpers))
        predicted[heaviest] += instance - load[replicated].sum()
        predicted[helpers] += instance
    weights: Floats = 1 / np.maximum(predicted, 1.0)
    return weights
