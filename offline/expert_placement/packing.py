"""Packing of expert replicas into slots so that the slowest rank takes little time, in all layers at once.

Arrays: L layers, E experts, G ranks, C slots per rank. Slots are int[L, G, C]; the id E marks an empty
slot. A price list is float[L, E + 1, G]: the cost of one replica on each rank, s; the last row is zero.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from eldr_serve.arrays import Floats, Ints


def price_list(token_s: Floats, active_s: Floats, copies: Ints) -> Floats:
    """Return the price list of replicas that share an expert's tokens evenly.

    Args:
        token_s: [L, E, G] all work of the expert on the rank, s.
        active_s: [L, E] cost of each replica independent of its share, s.
        copies: [L, E] replicas.
    """
    price = np.zeros((token_s.shape[0], token_s.shape[1] + 1, token_s.shape[2]))
    price[:, :-1] = active_s[..., None] + token_s / np.maximum(copies, 1)[..., None]
    return price


def rank_s(slots: Ints, price: Floats) -> Floats:
    """Return float[L, G], the total cost of each rank's replicas."""
    layer, rank = np.ogrid[: slots.shape[0], : slots.shape[1]]
    total: Floats = price[layer[..., None], slots, rank[..., None]].sum(axis=2)
    return total


def copies_of(slots: Ints, experts: int) -> Ints:
    """Return int[L, E], the replicas of each expert."""
    copies: Ints = rank_hosts(slots, experts)[:, :-1].sum(axis=2)
    return copies


def rank_hosts(slots: Ints, experts: int) -> NDArray[np.bool_]:
    """Return whether a rank holds an expert, bool[L, E + 1, G]. The last row, of empty slots, is False."""
    hosts = np.zeros((len(slots), experts + 1, slots.shape[1]), bool)
    layer, rank = np.ogrid[: slots.shape[0], : slots.shape[1]]
    hosts[layer[..., None], slots, rank[..., None]] = True
    hosts[:, experts] = False
    return hosts


def replica_counts(token_s: Floats, spare: int, ranks: int, target_s: Floats) -> Ints:
    """Return int[L, E] replicas: each spare slot goes to the expert with the most work per replica.

    An expert gets none if that work is at most `target_s` [L], or if every rank has it.
    """
    copies = np.ones(token_s.shape, np.int64)
    layer = np.arange(len(token_s))
    for _ in range(spare):
        share = np.where(copies < ranks, token_s / copies, -1.0)
        busiest = share.argmax(axis=1)
        copies[layer, busiest] += share[layer, busiest] > target_s
    return copies


def fill_empty_slots(slots: Ints, price: Floats, copies: Ints, quota: Ints | None, column: Ints) -> Ints:
    """Fill empty slots with the missing replicas, heaviest first, each on the rank with the least total.

    Args:
        slots: current slots. Their replicas do not move.
        copies: [L, E] number of replicas. A replica is omitted if every rank with room holds the expert.
        quota: [L, E, N] number of replicas in each column of ranks; None: anywhere.
        column: [G] column of each rank.
    """
    slots = slots.copy()
    size, experts = copies.shape
    hosts = rank_hosts(slots, experts)
    cost = rank_s(slots, price)
    room = (slots == experts).sum(axis=2)
    missing = np.maximum(copies - hosts[:, :-1].sum(axis=2), 0)
    remaining = None
    if quota is not None:
        present = [hosts[:, :-1, column == n].sum(axis=2) for n in range(quota.shape[2])]
        remaining = quota - np.stack(present, axis=2)
    # First replicas of experts get slots before all second ones; among them, the heaviest comes first.
    is_first = hosts[:, :-1].sum(axis=2) == 0
    weight = price[:, :-1].mean(axis=2)
    layer = np.arange(size)
    num_reserved = is_first.sum(axis=1)
    for _ in range(int(missing.sum(axis=1).max(initial=0))):
        is_open = missing > 0
        # Reserve slots for experts without a replica.
        is_open &= is_first | (room.sum(axis=1) > num_reserved)[:, None]
        item = np.where(is_open, weight, -1.0).argmax(axis=1)
        has_item = is_open[layer, item]
        fits = (room > 0) & ~hosts[layer, item]
        score = np.where(fits, cost + price[layer, item], np.inf)
        if remaining is not None:
            score = score + np.where(remaining[layer, item][:, column] > 0, 0.0, 1e6)
        rank = score.argmin(axis=1)
        has_place = has_item & fits[layer, rank]
        missing[layer, item] = np.where(has_place, missing[layer, item] - 1, 0)
        in_layer, expert, to_rank = layer[has_place], item[has_place], rank[has_place]
        slots[in_layer, to_rank, (slots[in_layer, to_rank] == experts).argmax(axis=1)] = expert
        cost[in_layer, to_rank] += price[in_layer, expert, to_rank]
        room[in_layer, to_rank] -= 1
        hosts[in_layer, expert, to_rank] = True
        num_reserved[in_layer] -= is_first[in_layer, expert]
        is_first[in_layer, expert] = False
        if remaining is not None:
            remaining[in_layer, expert, column[to_rank]] -= 1
    return slots


def swap_slots(slots: Ints, price: Floats, target_s: Floats) -> Ints:
    """Improve by local search: the slowest rank swaps a slot with another rank.

    Each swap is the one after which the slower of the two ranks takes the least time. The search of a layer
    ends when it reaches `target_s` [L] or no swap helps. An empty slot swaps like any other.
    """
    slots = slots.copy()
    experts = price.shape[1] - 1
    ranks, room = slots.shape[1:]
    rank_by_slot = np.repeat(np.arange(ranks), room)
    pending = np.arange(len(slots))
    while len(pending):
        rows = slots[pending]
        index = np.arange(len(pending))
        cost = rank_s(rows, price[pending])
        slow = cost.argmax(axis=1)
        worst = cost[index, slow]
        hosts = rank_hosts(rows, experts)
        a, b = rows[index, slow], rows.reshape(len(pending), -1)
        prices, every = price[pending], index[:, None]
        out_a, in_b = prices[every, a, slow[:, None]], prices[every, b, slow[:, None]]
        out_b, in_a = prices[every, b, rank_by_slot], prices[every, a][..., rank_by_slot]
        after = np.maximum(
            worst[:, None, None] - out_a[..., None] + in_b[:, None, :],
            (cost[:, rank_by_slot] - out_b)[:, None, :] + in_a,
        )
        is_duplicate = hosts[every, b, slow[:, None]][:, None, :] | hosts[every, a][..., rank_by_slot]
        after[is_duplicate | (rank_by_slot == slow[:, None])[:, None, :]] = np.inf
        flat = after.reshape(len(pending), -1)
        best = flat.argmin(axis=1)
        better = (flat[index, best] < worst * (1 - 1e-6)) & (worst > target_s[pending])
        improved = index[better]
        i, j = best[improved] // b.shape[1], best[improved] % b.shape[1]
        out, into = a[improved, i], b[improved, j]
        slots[pending[improved], slow[improved], i] = into
        slots[pending[improved], rank_by_slot[j], j % room] = out
        pending = pending[better]
    return slots


def reassign_spares(slots: Ints, token_s: Floats, active_s: Floats, target_s: float) -> Ints:
    """Improve the replicas of one layer by local search.

    A slot of a spare replica, or an empty one, goes to an expert of the slowest rank, or is left empty,
    whichever minimises the time of the slowest rank.

    Args:
        slots: [G, C]; token_s [E, G], active_s [E] as in `price_list`.
    """
    slots = slots.copy()
    experts, ranks = token_s.shape
    rank_by_slot = np.repeat(np.arange(ranks), slots.shape[1])
    row = np.arange(len(rank_by_slot))
    whole = np.concatenate([token_s, np.zeros((1, ranks))])  # a last row for empty slots
    active = np.append(active_s, 0.0)
    while True:
        hosts = rank_hosts(slots[None], experts)[0]
        copies = np.maximum(hosts.sum(axis=1), 1).astype(np.float64)
        price = active[:, None] + whole / copies[:, None]
        cost = rank_s(slots[None], price[None])[0]
        worst = float(cost.max())
        if worst <= target_s:
            return slots
        flat = slots.reshape(-1)
        spare_slots = np.flatnonzero((copies[flat] > 1) | (flat == experts))
        out, owner = flat[spare_slots], rank_by_slot[spare_slots]
        more = np.where(hosts, whole * (1 / np.maximum(copies - 1, 1) - 1 / copies)[:, None], 0.0)
        removed = more[out]
        removed[row[: len(out)], owner] = -price[out, owner]
        candidates = np.unique(np.append(slots[cost.argmax()], experts))
        less = np.where(hosts, whole * (1 / (copies + 1) - 1 / copies)[:, None], 0.0)[candidates]
        after = cost + removed[:, None, :] + less[None, :, :]
        share = whole[candidates] / (copies[candidates, None] + 1)
        added = np.where(candidates[:, None] < experts, active[candidates, None] + share, 0.0)
        after[row[: len(out)], :, owner] += added[:, owner].T
        slowest = after.max(axis=2)
        slowest[hosts[candidates][:, owner].T | (out[:, None] == candidates)] = np.inf
        best = np.unravel_index(slowest.argmin(), slowest.shape) if slowest.size else None
        if best is None or slowest[best] >= worst * (1 - 1e-6):
            return slots
        slots.reshape(-1)[spare_slots[best[0]]] = candidates[best[1]]


def fill_empty_ranks(slots: Ints, token_s: Floats, active_s: Floats, reached_s: Floats) -> Floats:
    """Give each rank without an expert the expert with the least work, in place.

    Args:
        slots: slots of each rank, which may be empty. They change in place.
        token_s, active_s: as in `price_list`.
        reached_s: [L] time of each layer's slowest rank before.

    Returns:
        [L], time of each layer's slowest rank afterwards, s.
    """
    experts = token_s.shape[1]
    empty = (slots == experts).all(axis=2)
    if not empty.any():
        return reached_s
    idlest = token_s.mean(axis=2).argmin(axis=1)[:, None]
    slots[..., 0] = np.where(empty, idlest, slots[..., 0])
    price = price_list(token_s, active_s, copies_of(slots, experts))
    return np.where(empty.any(axis=1), rank_s(slots, price).max(axis=1), reached_s)


def repeat_in_empty_slots(slots: Ints, experts: int) -> Ints:
    """Fill empty slots by repeating an expert of their rank.

    If possible, the expert is on no other rank, so that no token moves. Every rank must hold an expert.
    """
    slots = slots.copy()
    is_single = copies_of(slots, experts) == 1
    for layer, rank in np.argwhere((slots == experts).any(axis=2)):
        row = slots[layer, rank]
        present = row[row < experts]
        single = present[is_single[layer, present]]
        slots[layer, rank] = np.where(row == experts, single[0] if len(single) else present[0], row)
    return slots
