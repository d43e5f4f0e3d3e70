"""DIRECTOR's placement: where experts should be for the next batch (sections VI, VII).

Tokens by source rank and expert give each expert a price on each rank (`LayerCost`). The placement minimises
the time of each layer's slowest rank.

The paper searches for the least budget that bounds the sum over layers. Since no constraint couples layers,
this budget adds up the optimum of a min-max LP for each layer, and each LP is solved directly, without a
search. Then replicas are counted and rounded by a random walk within the LP's polytope, packed into slots and
improved by local search.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from eldr_serve.arrays import Floats, Ints
from eldr_serve.errors import UserInputError
from eldr_serve.experts.expert_placement import Topology
from offline.expert_placement.alignment import minimise_moves
from offline.expert_placement.cost import LayerCost
from offline.expert_placement.packing import (
    copies_of,
    fill_empty_ranks,
    fill_empty_slots,
    price_list,
    rank_s,
    reassign_spares,
    repeat_in_empty_slots,
    replica_counts,
    swap_slots,
)
from offline.expert_placement.relaxation import Relaxation, relax, slots_bound
from offline.expert_placement.rounding import round_in_polytope
from offline.expert_placement.workload import check_slots, placement_time_s, price_experts, split_by_source

_CLOSE_TO_BOUND = 0.02  # relative distance to the bound at which a layer's number of replicas is kept
# Share of the current time that a new placement must save beyond a repair, which moves fewer experts.
_MIN_EXTRA_SAVING = 0.01
_SWAP_TOLERANCE = 2e-3  # gain relative to the bound below which no swap is made


@dataclass(frozen=True)
class DirectorReport:
    """Quality of a placement for its workload. All times are float[L], s, without the cost's `fixed_s`.

    Attributes:
        lp_s: optimum of the LP relaxation; with many ranks, of a smaller relaxation over nodes. No
            placement is faster, however finely it shares tokens.
        bound_s: a higher lower bound, which also counts the whole slots that replicas need.
        rank_s: time of the placement's slowest rank.
    """

    lp_s: Floats
    bound_s: Floats
    rank_s: Floats

    @property
    def excess_over_lp(self) -> float:
        """Return how far all layers together are above the LP's optimum. 0.01 is 1 %."""
        return _relative_excess(self.rank_s, self.lp_s)

    @property
    def excess_over_bound(self) -> float:
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
    tolerance: float = _SWAP_TOLERANCE,
    seed: int = 0,
) -> tuple[Ints, DirectorReport]:
    """Return the placement for a pending batch; replicas of an expert share its tokens evenly.

    Args:
        workload: tokens by source rank and expert, [L, G, E]; or [L, E] if all ranks have the same tokens.
        slots: slots of each rank, C (the paper's C_max); ranks * slots = P.
        token_bytes: bytes that a token sends to a rank which serves it.
        start: int[L, P], a placement to improve with the swaps that the tolerance requires; None: make a
            new one.
        tolerance: distance to the bound at which a layer is good enough.
        seed: seed of the random walk that rounds.

    Returns:
        int[L, P], rank-major, and its quality. Slots that need no expert repeat one of the same rank.

    Raises:
        UserInputError: the workload has another shape or is not finite, or slots are fewer than experts.
    """
    tokens = split_by_source(workload, topology)
    layers, _, experts = tokens.shape
    ranks = topology.ranks
    check_slots(ranks, slots, experts)
    token_s, active_s = price_experts(tokens, topology, cost, token_bytes)
    relaxation = relax(token_s + active_s[..., None], topology, slots)
    bound_s = np.maximum(relaxation.lp_s, slots_bound(token_s.min(axis=2), active_s, ranks, slots))
    spare = ranks * slots - experts
    mean_s = token_s.mean(axis=2)
    empty = np.full((layers, ranks, slots), experts)
    initial = empty if start is None else _parse_start(start, tokens, slots)
    best, reached_s = initial.copy(), np.full(layers, np.inf)
    # A replica costs a read of its weights or traffic to another node, so fewer replicas may be better.
    # If a layer is not close to the bound with all replicas, try it with only the replicas that the bound
    # requires, and then without replicas. A new placement follows the rounded LP first; layers that are
    # then not close to the bound are also packed without the LP.
    for target_s, follows_lp in product(
        (np.zeros(layers), bound_s - cost.per_expert_s, np.full(layers, np.inf)),
        (False,) if start is not None else (True, False),
    ):
        far = np.flatnonzero(reached_s > bound_s * (1 + _CLOSE_TO_BOUND))  # layers
        copies = replica_counts(mean_s[far], spare, ranks, target_s[far])
        price = price_list(token_s[far], active_s[far], copies)
        quota = _round_quota(relaxation, far, copies, slots, seed) if follows_lp else None
        current = initial[far] if start is None else _remove_surplus(initial[far], copies, price)
        candidate = fill_empty_slots(current, price, copies, quota, relaxation.column)
        candidate, worst_s = _search(candidate, token_s[far], active_s[far], bound_s[far] * (1 + tolerance))
        better = worst_s < reached_s[far]
        best[far[better]], reached_s[far[better]] = candidate[better], worst_s[better]
    reached_s = fill_empty_ranks(best, token_s, active_s, reached_s)
    placement = repeat_in_empty_slots(best, experts).reshape(layers, -1)
    return placement, DirectorReport(relaxation.lp_s, bound_s, reached_s)


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

    The candidates are a new placement by LP and rounding, and a repair of `start`, which moves few experts.
    The repair is chosen unless the new placement saves at least `_MIN_EXTRA_SAVING` more time.
    If neither saves time, the result is `start`.

    Args:
        workload, topology, slots, cost, token_bytes, seed: as for `director_placement`.
        start: int[L, P], the current placement.

    Returns:
        int[L, P], in which experts that stay keep their slots, and the share of all layers' time saved.
    """
    engine: dict[str, Any] = {"topology": topology, "cost": cost, "token_bytes": token_bytes}
    alike = not token_bytes or not (cost.near_byte_s or cost.far_byte_s)
    current_s = placement_time_s(workload, start, **engine)
    best, least_s = np.asarray(start), current_s
    for origin in (start, None):
        candidate = director_placement(workload, slots=slots, start=origin, seed=seed, **engine)[0]
        candidate = minimise_moves(start, candidate, topology.ranks, ranks_alike=alike)
        seconds = placement_time_s(workload, candidate, **engine)
        if seconds < least_s - (0.0 if origin is not None else _MIN_EXTRA_SAVING * current_s):
            best, least_s = candidate, seconds
    return best, 1 - least_s / current_s if current_s else 0.0


def _search(slots: Ints, token_s: Floats, active_s: Floats, target_s: Floats) -> tuple[Ints, Floats]:
    """Improve layers by swaps and changes of replicas, in place, while either helps.

    Returns:
        The slots, and the time of each layer's slowest rank, s [L].
    """
    experts = token_s.shape[1]
    pending = np.arange(len(slots))
    reached_s = np.full(len(slots), np.inf)
    while len(pending):
        price = price_list(token_s[pending], active_s[pending], copies_of(slots[pending], experts))
        slots[pending] = swap_slots(slots[pending], price, target_s[pending])
        reached_s[pending] = rank_s(slots[pending], price).max(axis=1)
        before = slots.copy()
        for layer in pending[reached_s[pending] > target_s[pending]]:
            slots[layer] = reassign_spares(slots[layer], token_s[layer], active_s[layer], target_s[layer])
        pending = pending[(slots[pending] != before[pending]).any(axis=(1, 2))]
    return slots, reached_s


def _round_quota(relaxation: Relaxation, layers: Ints, copies: Ints, slots: int, seed: int) -> Ints | None:
    """Return the rounded replicas of these layers per column, int[n, E, N]; None for one column."""
    width = np.bincount(relaxation.column)
    if len(width) == 1 or not len(layers):
        return None
    rng = np.random.default_rng(seed)
    per_layer = zip(
        relaxation.share[layers], relaxation.price[layers], copies, relaxation.lp_s[layers], strict=True
    )
    return np.stack(
        [
            round_in_polytope(share * number[:, None], price / number[:, None], width * slots, budget, rng)
            for share, price, number, budget in per_layer
        ]
    )


def _parse_start(start: ArrayLike, tokens: Floats, slots: int) -> Ints:
    """Return int[L, G, C] of a placement. A second replica on a rank becomes an empty slot."""
    layers, ranks, experts = tokens.shape
    placement = np.asarray(start)
    if placement.shape != (layers, ranks * slots):
        raise UserInputError(f"the start has shape {placement.shape}, not ({layers}, {ranks * slots})")
    if placement.min() < 0 or placement.max() >= experts:
        raise UserInputError(f"the start names an expert outside 0 to {experts - 1}")
    rows = placement.reshape(-1, slots).astype(np.int64)
    earlier = np.tril(rows[:, :, None] == rows[:, None, :], k=-1).any(axis=2)
    return np.where(earlier, experts, rows).reshape(layers, ranks, slots)


def _remove_surplus(slots: Ints, copies: Ints, price: Floats) -> Ints:
    """Remove replicas beyond `copies` from the slots, first on the most expensive ranks."""
    remaining = slots.copy()
    experts = copies.shape[1]
    surplus = copies_of(remaining, experts) - copies
    cost = rank_s(remaining, price)
    for layer, expert in np.argwhere(surplus > 0):
        holders, slot = np.nonzero(remaining[layer] == expert)
        dearest = np.argsort(-cost[layer, holders], kind="stable")[: surplus[layer, expert]]
        remaining[layer, holders[dearest], slot[dearest]] = experts
    return remaining


def _relative_excess(value: Floats, bound: Floats) -> float:
    total = float(bound.sum())
    return float(value.sum()) / total - 1 if total else 0.0
