"""Pack expert replicas into the slots of ranks so that the slowest rank is fast; all layers at once.

Arrays: L layers, E experts, G ranks, C slots per rank. Slots are int[L, G, C]; the id E marks an empty
slot. A price list is float[L, E + 1, G]: the cost of one replica on each rank, s; the last row is zero.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


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
    copies: Ints = held_by(slots, experts)[:, :-1].sum(axis=2)
    return copies


def held_by(slots: Ints, experts: int) -> NDArray[np.bool_]:
    """Return bool[L, E + 1, G]; the last row, of empty slots, is never held."""
    held = np.zeros((len(slots), experts + 1, slots.shape[1]), bool)
    layer, rank = np.ogrid[: slots.shape[0], : slots.shape[1]]
    held[layer[..., None], slots, rank[..., None]] = True
    held[:, experts] = False
    return held


def replica_counts(token_s: Floats, spare: int, ranks: int, enough_s: Floats) -> Ints:
    """Return int[L, E] replicas: each spare slot goes to the expert with the most work per replica.

    An expert gets none if that work is at most `enough_s` [L], or if every rank has it.
    """
    copies = np.ones(token_s.shape, np.int64)
    layer = np.arange(len(token_s))
    for _ in range(spare):
        share = np.where(copies < ranks, token_s / copies, -1.0)
        busiest = share.argmax(axis=1)
        copies[layer, busiest] += share[layer, busiest] > enough_s
    return copies


def fill_empty_slots(slots: Ints, price: Floats, copies: Ints, quota: Ints | None, column: Ints) -> Ints:
    """Fill empty slots with the missing replicas, heaviest first, each on the rank with the least total.

    Args:
        slots: present slots; their replicas do not move.
        copies: [L, E] wanted replicas; one that every rank with room already holds is omitted.
        quota: [L, E, N] replicas wanted in each column of ranks; None: anywhere.
        column: [G] column of each rank.
    """
    slots = slots.copy()
    size, experts = copies.shape
    held = held_by(slots, experts)
    cost = rank_s(slots, price)
    room = (slots == experts).sum(axis=2)
    missing = np.maximum(copies - held[:, :-1].sum(axis=2), 0)
    left = None
    if quota is not None:
        left = quota - np.stack([held[:, :-1, column == n].sum(2) for n in range(quota.shape[2])], axis=2)
    # The first replica of each expert must find a slot before the second of any. Then the heaviest.
    first = held[:, :-1].sum(axis=2) == 0
    weight = price[:, :-1].mean(axis=2)
    layer = np.arange(size)
    reserved = first.sum(axis=1)
    for _ in range(int(missing.sum(axis=1).max(initial=0))):
        open_ = missing > 0
        # Reserve slots for experts without a replica.
        open_ &= first | (room.sum(axis=1) > reserved)[:, None]
        item = np.where(open_, weight, -1.0).argmax(axis=1)
        wanted = open_[layer, item]
        fits = (room > 0) & ~held[layer, item]
        score = np.where(fits, cost + price[layer, item], np.inf)
        if left is not None:
            score = score + np.where(left[layer, item][:, column] > 0, 0.0, 1e6)
        rank = score.argmin(axis=1)
        placed = wanted & fits[layer, rank]
        missing[layer, item] = np.where(placed, missing[layer, item] - 1, 0)
        at, expert, to = layer[placed], item[placed], rank[placed]
        slots[at, to, (slots[at, to] == experts).argmax(axis=1)] = expert
        cost[at, to] += price[at, expert, to]
        room[at, to] -= 1
        held[at, expert, to] = True
        reserved[at] -= first[at, expert]
        first[at, expert] = False
        if left is not None:
            left[at, expert, column[to]] -= 1
    return slots


def swap_slots(slots: Ints, price: Floats, enough_s: Floats) -> Ints:
    """Improve by local search: the slowest rank swaps a slot with another rank.

    Each swap is the one after which the slower of the two is fastest, until the layer reaches `enough_s` [L]
    or no swap helps. An empty slot swaps like any other.
    """
    slots = slots.copy()
    experts = price.shape[1] - 1
    ranks, room = slots.shape[1:]
    of_slot = np.repeat(np.arange(ranks), room)
    open_ = np.arange(len(slots))
    while len(open_):
        mine = slots[open_]
        here = np.arange(len(open_))
        cost = rank_s(mine, price[open_])
        slow = cost.argmax(axis=1)
        worst = cost[here, slow]
        held = held_by(mine, experts)
        a, b = mine[here, slow], mine.reshape(len(open_), -1)
        local, every = price[open_], here[:, None]
        out_a, in_b = local[every, a, slow[:, None]], local[every, b, slow[:, None]]
        out_b, in_a = local[every, b, of_slot], local[every, a][..., of_slot]
        after = np.maximum(
            worst[:, None, None] - out_a[..., None] + in_b[:, None, :],
            (cost[:, of_slot] - out_b)[:, None, :] + in_a,
        )
        twice = held[every, b, slow[:, None]][:, None, :] | held[every, a][..., of_slot]
        after[twice | (of_slot == slow[:, None])[:, None, :]] = np.inf
        flat = after.reshape(len(open_), -1)
        best = flat.argmin(axis=1)
        better = (flat[here, best] < worst * (1 - 1e-6)) & (worst > enough_s[open_])
        at = here[better]
        i, j = best[at] // b.shape[1], best[at] % b.shape[1]
        out, into = a[at, i], b[at, j]
        slots[open_[at], slow[at], i] = into
        slots[open_[at], of_slot[j], j % room] = out
        open_ = open_[better]
    return slots


def reassign_spares(slots: Ints, token_s: Floats, active_s: Floats, enough_s: float) -> Ints:
    """Improve the replicas of one layer by local search.

    A slot of a spare replica, or an empty one, goes to an expert of the slowest rank, or is left empty,
    whichever makes the slowest rank fastest.

    Args:
        slots: [G, C]; token_s [E, G], active_s [E] as in `price_list`.
    """
    slots = slots.copy()
    experts, ranks = token_s.shape
    of_slot = np.repeat(np.arange(ranks), slots.shape[1])
    row = np.arange(len(of_slot))
    whole = np.concatenate([token_s, np.zeros((1, ranks))])  # a last row for empty slots
    active = np.append(active_s, 0.0)
    while True:
        held = held_by(slots[None], experts)[0]
        copies = np.maximum(held.sum(axis=1), 1).astype(np.float64)
        price = active[:, None] + whole / copies[:, None]
        cost = rank_s(slots[None], price[None])[0]
        worst = float(cost.max())
        if worst <= enough_s:
            return slots
        flat = slots.reshape(-1)
        spared = np.flatnonzero((copies[flat] > 1) | (flat == experts))
        out, at = flat[spared], of_slot[spared]
        more = np.where(held, whole * (1 / np.maximum(copies - 1, 1) - 1 / copies)[:, None], 0.0)
        removed = more[out]
        removed[row[: len(out)], at] = -price[out, at]
        coming = np.unique(np.append(slots[cost.argmax()], experts))
        less = np.where(held, whole * (1 / (copies + 1) - 1 / copies)[:, None], 0.0)[coming]
        after = cost + removed[:, None, :] + less[None, :, :]
        joins = np.where(
            coming[:, None] < experts, active[coming, None] + whole[coming] / (copies[coming, None] + 1), 0.0
        )
        after[row[: len(out)], :, at] += joins[:, at].T
        slowest = after.max(axis=2)
        slowest[held[coming][:, at].T | (out[:, None] == coming)] = np.inf
        best = np.unravel_index(slowest.argmin(), slowest.shape) if slowest.size else None
        if best is None or slowest[best] >= worst * (1 - 1e-6):
            return slots
        slots.reshape(-1)[spared[best[0]]] = coming[best[1]]
