"""Placement by simulated annealing: the baseline that DIRECTOR's is compared with (section VIII-D)."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from eldr_serve.expert_placement import Topology
from offline.placement.cost import LayerCost
from offline.placement.director import by_source, full_slots, prices
from offline.placement.packing import copies_of, held_by, packed, priced, rank_s, replicated

Ints = NDArray[np.int64]


def annealed_placement(
    workload: ArrayLike,
    *,
    topology: Topology,
    slots: int,
    cost: LayerCost,
    token_bytes: float = 0.0,
    steps: int = 20_000,
    seed: int = 0,
) -> tuple[Ints, NDArray[np.float64]]:
    """Random swaps between ranks from a random placement, accepted by the slowest rank's time.

    The temperature falls geometrically from a tenth of the mean rank's time to a ten-thousandth. Replicas
    are DIRECTOR's. All layers anneal at once, each for itself.

    Args:
        steps: swaps tried in each layer. The others as `director_placement`.

    Returns:
        int[L, P], the best placement met, and float[L] what its slowest rank takes, s.
    """
    rng = np.random.default_rng(seed)
    tokens = by_source(workload, topology)
    layers, _, experts = tokens.shape
    ranks = topology.ranks
    if ranks * slots < experts:
        raise ValueError(f"{ranks} ranks of {slots} slots cannot hold {experts} experts")
    token_s, active_s = prices(tokens, topology, cost, token_bytes)
    copies = replicated(token_s.mean(axis=2), ranks * slots - experts, ranks, np.zeros(layers))
    anywhere = np.zeros((layers, experts + 1, ranks))
    anywhere[:, :-1] = rng.random((layers, experts, ranks))  # random prices pack at random
    now = packed(np.full((layers, ranks, slots), experts), anywhere, copies, None, np.zeros(ranks, np.int64))
    price = priced(token_s, active_s, copies_of(now, experts))
    total = rank_s(now, price)
    held = held_by(now, experts)
    layer = np.arange(layers)
    energy = total.max(axis=1)
    best, lowest = now.copy(), energy.copy()
    scale = total.mean(axis=1)
    for step in range(steps):
        g, h = rng.integers(ranks, size=(2, layers))
        i, j = rng.integers(slots, size=(2, layers))
        a, b = now[layer, g, i], now[layer, h, j]
        after = total.copy()
        after[layer, g] += price[layer, b, g] - price[layer, a, g]
        after[layer, h] += price[layer, a, h] - price[layer, b, h]
        worst = after.max(axis=1)
        heat = 0.1 * 1e-3 ** (step / steps) * scale + 1e-300
        allowed = (g != h) & ~held[layer, b, g] & ~held[layer, a, h]
        taken = allowed & (rng.random(layers) < np.exp(np.minimum(energy - worst, 0) / heat))
        at, ga, hb = layer[taken], g[taken], h[taken]
        now[at, ga, i[taken]], now[at, hb, j[taken]] = b[taken], a[taken]
        held[at, a[taken], ga] = held[at, b[taken], hb] = False
        held[at, a[taken], hb] = held[at, b[taken], ga] = True
        held[:, experts] = False
        total = np.where(taken[:, None], after, total)
        energy = np.where(taken, worst, energy)
        better = energy < lowest
        best[better], lowest[better] = now[better], energy[better]
    return full_slots(best, experts).reshape(layers, -1), rank_s(best, price).max(axis=1)
