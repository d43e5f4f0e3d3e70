"""DIRECTOR's placement: where experts should be for the next batch (sections VI, VII).

Tokens by source rank and expert give each expert a price on each rank (`LayerCost`); the placement minimises
the time of each layer's slowest rank. The paper's budget bounds the sum over layers, and no constraint
couples layers, so the least budget is the sum of the layers' own min-max LPs, and each is solved directly,
without a binary search. Replicas, iterative rounding within the LP's polytope by a random walk,
packing and local search follow.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from eldr_serve.errors import UserInputError
from eldr_serve.experts.parallel.placement import Topology, hosts_of
from offline.placement.alignment import minimise_moves
from offline.placement.cost import LayerCost, LayerWork
from offline.placement.packing import (
    copies_of,
    fill_empty_slots,
    price_list,
    rank_s,
    reassign_spares,
    replica_counts,
    swap_slots,
)
from offline.placement.relaxation import Relaxation, relax, slots_bound
from offline.placement.rounding import round_in_polytope

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
_CLOSE_TO_BOUND = 0.02  # relative distance to the bound below which no other number of replicas is tried
_WORTH = 0.01  # share of the present time that a new placement must save beyond a repair, which moves less
_TOLERANCE = 2e-3  # relative to the bound: smaller gains are not worth a swap


@dataclass(frozen=True)
class DirectorReport:
    """Quality of a placement for its workload; [L] each, s, without `fixed_s`.

    Attributes:
        lp_s: optimum of the LP relaxation (or, with many ranks, of its smaller relaxation by nodes): no
            placement is faster, however finely tokens are shared.
        bound_s: the same bound, if experts that exceed it also need whole slots for their replicas.
        rank_s: time of the placement's slowest rank.
    """

    lp_s: Floats
    bound_s: Floats
    rank_s: Floats

    @property
    def gap(self) -> float:
        """Return how far all layers together are above the LP's optimum; 0.01 is 1 %."""
        return _relative_excess(self.rank_s, self.lp_s)

    @property
    def bound_gap(self) -> float:
        """Return how far all layers together are above `bound_s`."""
        return _relative_excess(self.rank_s, self.bound_s)


def director_placement(
    workload: ArrayLike,
    *,
    topology: Topology,
    slots: int,
    cost: LayerCost,
    token_bytes: float = 0.0,
    start: ArrayLike | None = None,
    tolerance: float = _TOLERANCE,
    seed: int = 0,
) -> tuple[Ints, DirectorReport]:
    """Return the placement for a pending batch; replicas of an expert share its tokens evenly.

    Args:
        workload: tokens by source rank and expert, [L, G, E]; or by expert, [L, E], if all ranks have
            the same.
        slots: slots of each rank, C (the paper's C_max); ranks * slots = P.
        token_bytes: bytes that a token sends to a rank which serves it.
        start: int[L, P], a placement to improve with as few swaps as reach the tolerance; None: a new one.
        tolerance: distance to the bound at which a layer is good enough.
        seed: of the random walk that rounds.

    Returns:
        int[L, P], rank-major, and its quality. Slots that no replica needs repeat an expert of
        the same rank.

    Raises:
        UserInputError: the workload has another shape or is not finite, or slots are fewer than experts.
    """
    tokens = by_source(workload, topology)
    layers, _, experts = tokens.shape
    ranks = topology.ranks
    check_slots(ranks, slots, experts)
    token_s, active_s = prices(tokens, topology, cost, token_bytes)
    relaxation = relax(token_s + active_s[..., None], topology, slots)
    bound_s = np.maximum(relaxation.lp_s, slots_bound(token_s.min(axis=2), active_s, ranks, slots))
    spare = ranks * slots - experts
    mean_s = token_s.mean(axis=2)
    begun = np.full((layers, ranks, slots), experts) if start is None else _parsed(start, tokens, slots)
    best, reached = begun.copy(), np.full(layers, np.inf)
    # Replicas cost reads of weights or traffic to another node, so fewer may be better. Layers that are not
    # close to the bound with all replicas try those that the bound forces, then none. A new placement
    # follows the rounded LP first; layers not close to the bound are also packed without it.
    for enough_s, rounded in product(
        (np.zeros(layers), bound_s - cost.per_expert_s, np.full(layers, np.inf)),
        (False,) if start is not None else (True, False),
    ):
        at = np.flatnonzero(reached > bound_s * (1 + _CLOSE_TO_BOUND))
        copies = replica_counts(mean_s[at], spare, ranks, enough_s[at])
        price = price_list(token_s[at], active_s[at], copies)
        quota = _quota(relaxation, at, copies, slots, seed) if rounded else None
        kept = begun[at] if start is None else _kept(begun[at], copies, price)
        tried = fill_empty_slots(kept, price, copies, quota, relaxation.column)
        tried, worst = _searched(tried, token_s[at], active_s[at], bound_s[at] * (1 + tolerance))
        better = worst < reached[at]
        best[at[better]], reached[at[better]] = tried[better], worst[better]
    reached = fill_empty_ranks(best, token_s, active_s, reached)
    return full_slots(best, experts).reshape(layers, -1), DirectorReport(relaxation.lp_s, bound_s, reached)


def renewed_placement(
    workload: ArrayLike,
    start: ArrayLike,
    *,
    topology: Topology,
    slots: int,
    cost: LayerCost,
    token_bytes: float = 0.0,
    seed: int = 0,
) -> tuple[Ints, float]:
    """Return the placement for a pending batch that replaces `start`, and its gain.

    Of a new placement, by LP and rounding, and a repair of `start`, which moves few experts, the one with the
    least time wins; the repair, unless the new placement saves at least `_WORTH` more.

    Args:
        workload, topology, slots, cost, token_bytes, seed: as for `director_placement`.
        start: int[L, P], the present placement.

    Returns:
        int[L, P], with experts that stay in their slots, and the share of all layers' time that it saves.
    """
    given: dict[str, Any] = {"topology": topology, "cost": cost, "token_bytes": token_bytes}
    alike = not token_bytes or not (cost.near_byte_s or cost.far_byte_s)
    now_s = placement_s(workload, start, **given)
    best, least_s = np.asarray(start), now_s
    for origin in (start, None):
        placed = director_placement(workload, slots=slots, start=origin, seed=seed, **given)[0]
        placed = minimise_moves(start, placed, topology.ranks, alike=alike)
        seconds = placement_s(workload, placed, **given)
        if seconds < least_s - (0.0 if origin is not None else _WORTH * now_s):
            best, least_s = placed, seconds
    return best, 1 - least_s / now_s if now_s else 0.0


def placement_s(
    workload: ArrayLike,
    placement: ArrayLike,
    *,
    topology: Topology,
    cost: LayerCost,
    token_bytes: float = 0.0,
) -> float:
    """Return the time of all layers by the cost, s, for a workload of `director_placement`."""
    experts = np.shape(workload)[-1]
    hosts = hosts_of(placement, experts, topology.ranks)
    work = placed_work(workload, hosts, topology=topology, token_bytes=token_bytes)
    return float(cost.layer_s(work).sum())


def check_slots(ranks: int, slots: int, experts: int) -> None:
    """Raise UserInputError if ranks with this many slots each cannot hold all experts."""
    if slots < 1 or ranks * slots < experts:
        raise UserInputError(f"{ranks} ranks of {slots} slots cannot hold {experts} experts")


def fill_empty_ranks(slots: Ints, token_s: Floats, active_s: Floats, reached: Floats) -> Floats:
    """Give each rank without expert the one with the least work, in place; return layers' times, s [L]."""
    experts = token_s.shape[1]
    empty = (slots == experts).all(axis=2)
    if not empty.any():
        return reached
    idlest = token_s.mean(axis=2).argmin(axis=1)[:, None]
    slots[..., 0] = np.where(empty, idlest, slots[..., 0])
    price = price_list(token_s, active_s, copies_of(slots, experts))
    return np.where(empty.any(axis=1), rank_s(slots, price).max(axis=1), reached)


def _searched(slots: Ints, token_s: Floats, active_s: Floats, enough_s: Floats) -> tuple[Ints, Floats]:
    """Return (slots, the slowest rank's s [L]) after swaps and changes of replicas, while either helps."""
    experts = token_s.shape[1]
    open_ = np.arange(len(slots))
    reached = np.full(len(slots), np.inf)
    while len(open_):
        price = price_list(token_s[open_], active_s[open_], copies_of(slots[open_], experts))
        slots[open_] = swap_slots(slots[open_], price, enough_s[open_])
        reached[open_] = rank_s(slots[open_], price).max(axis=1)
        before = slots.copy()
        for layer in open_[reached[open_] > enough_s[open_]]:
            slots[layer] = reassign_spares(slots[layer], token_s[layer], active_s[layer], enough_s[layer])
        open_ = open_[(slots[open_] != before[open_]).any(axis=(1, 2))]
    return slots, reached


def placed_work(
    workload: ArrayLike, hosts: NDArray[np.bool_], *, topology: Topology, token_bytes: float = 0.0
) -> LayerWork:
    """Return the work of a batch on each rank if replicas share an expert's tokens of every source evenly.

    Args:
        workload: [..., G, E] tokens by source rank and expert, or [..., E], if all ranks have the same.
        hosts: bool[..., E, G], by `hosts_of`.
    """
    tokens = np.asarray(workload, np.float64)
    if tokens.ndim == hosts.ndim - 1:
        tokens = np.repeat(tokens[..., None, :] / topology.ranks, topology.ranks, axis=-2)
    share = hosts / hosts.sum(axis=-1, keepdims=True)
    sent = tokens @ share  # [..., source, rank]
    same = topology.node_of[:, None] == topology.node_of[None, :]
    near, far = sent * (same & ~np.eye(topology.ranks, dtype=bool)), sent * ~same
    active = hosts & (tokens.sum(axis=-2) > 0)[..., None]
    return LayerWork(
        active.sum(axis=-2).astype(np.float64),
        sent.sum(axis=-2),
        token_bytes * near.sum(axis=-2),
        token_bytes * far.sum(axis=-2),
    )


def by_source(workload: ArrayLike, topology: Topology) -> Floats:
    """Return a workload of `director_placement` as float[L, G, E]; raise UserInputError if it is invalid."""
    tokens = np.asarray(workload, np.float64)
    if tokens.ndim == 2:
        tokens = np.repeat(tokens[:, None] / topology.ranks, topology.ranks, axis=1)
    if tokens.ndim != 3 or tokens.shape[1] != topology.ranks or not tokens.size:
        raise UserInputError(
            f"a workload of shape {np.shape(workload)} is neither [layers, experts] nor [layers, "
            f"{topology.ranks} ranks, experts]"
        )
    if not np.isfinite(tokens).all() or tokens.min() < 0:
        raise UserInputError("a workload must be finite and 0 or more")
    return tokens


def prices(tokens: Floats, topology: Topology, cost: LayerCost, token_bytes: float) -> tuple[Floats, Floats]:
    """Return token_s[L, E, G], for all tokens on the rank, and active_s[L, E], for reading the weights."""
    everyone = tokens.sum(axis=1)
    node = np.stack(
        [tokens[:, topology.node_of == n].sum(axis=1) for n in range(topology.nodes)], axis=2
    )  # [L, E, nodes]
    mine, local = np.swapaxes(tokens, 1, 2), node[:, :, topology.node_of]
    token_s = (
        cost.per_token_s * everyone[..., None]
        + cost.near_byte_s * token_bytes * (local - mine)
        + cost.far_byte_s * token_bytes * (everyone[..., None] - local)
    )
    return token_s, cost.per_expert_s * (everyone > 0)


def _quota(relaxation: Relaxation, at: Ints, copies: Ints, slots: int, seed: int) -> Ints | None:
    """Return int[n, E, N], replicas by column of ranks, of the layers `at`; None if there is one column."""
    width = np.bincount(relaxation.column)
    if len(width) == 1 or not len(at):
        return None
    rng = np.random.default_rng(seed)
    layers = zip(relaxation.share[at], relaxation.price[at], copies, relaxation.lp_s[at], strict=True)
    return np.stack(
        [
            round_in_polytope(share * number[:, None], price / number[:, None], width * slots, budget, rng)
            for share, price, number, budget in layers
        ]
    )


def _parsed(start: ArrayLike, tokens: Floats, slots: int) -> Ints:
    """Return int[L, G, C] of a placement; a second replica on a rank becomes an empty slot."""
    layers, ranks, experts = tokens.shape
    placement = np.asarray(start)
    if placement.shape != (layers, ranks * slots):
        raise UserInputError(f"the start has shape {placement.shape}, not ({layers}, {ranks * slots})")
    if placement.min() < 0 or placement.max() >= experts:
        raise UserInputError(f"the start names an expert outside 0 to {experts - 1}")
    rows = placement.reshape(-1, slots).astype(np.int64)
    earlier = np.tril(rows[:, :, None] == rows[:, None, :], k=-1).any(axis=2)
    return np.where(earlier, experts, rows).reshape(layers, ranks, slots)


def _kept(slots: Ints, copies: Ints, price: Floats) -> Ints:
    """Remove replicas beyond `copies` from the slots, first on the most expensive ranks."""
    kept = slots.copy()
    experts = copies.shape[1]
    surplus = copies_of(kept, experts) - copies
    cost = rank_s(kept, price)
    for layer, expert in np.argwhere(surplus > 0):
        holders, slot = np.nonzero(kept[layer] == expert)
        dearest = np.argsort(-cost[layer, holders], kind="stable")[: surplus[layer, expert]]
        kept[layer, holders[dearest], slot[dearest]] = experts
    return kept


def full_slots(slots: Ints, experts: int) -> Ints:
    """Fill empty slots with an expert of their rank, if possible one with no other rank, so no token moves.

    Every rank of `slots` [L, G, C] holds an expert.
    """
    slots = slots.copy()
    alone = copies_of(slots, experts) == 1
    for layer, rank in np.argwhere((slots == experts).any(axis=2)):
        row = slots[layer, rank]
        there = row[row < experts]
        single = there[alone[layer, there]]
        slots[layer, rank] = np.where(row == experts, single[0] if len(single) else there[0], row)
    return slots


def _relative_excess(value: Floats, bound: Floats) -> float:
    total = float(bound.sum())
    return float(value.sum()) / total - 1 if total else 0.0
