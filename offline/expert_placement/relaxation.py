"""Lower bounds of a placement's time, from the LP relaxation of each layer and from whole slots.

Arrays: L layers, E experts, G ranks, N columns of ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.optimize import linprog
from scipy.sparse import csr_array

from eldr_serve.arrays import Floats, Ints
from eldr_serve.experts.expert_placement import Topology

# Maximum variables of a layer's LP. Beyond it the LP has fewer columns: one per node, or two for one node.
_SMALL_LP = 512


@dataclass(frozen=True)
class Relaxation:
    """The LP relaxation over columns of ranks.

    Attributes:
        lp_s: float[L], optimum of each layer, s.
        share: float[L, E, N], share of each expert in each column.
        price: float[L, E, N], price of each expert in each column, s.
        column: int[G], column of each rank.
    """

    lp_s: Floats
    share: Floats
    price: Floats
    column: Ints


def relax(price: Floats, topology: Topology, slots: int) -> Relaxation:
    """Solve the LP (6) of each layer over columns of ranks.

    In a small LP a column is one rank. In a large one it is a block of ranks of a node, which share the work
    at the price of the cheapest rank, so that the optimum is still a lower bound of every placement. The LP
    is also solved if all ranks are alike: its solution, a vertex, shows which experts share a column, and
    splits few of them.
    """
    column = _columns(price.shape[1], topology)
    width = np.bincount(column)
    least = np.stack([price[:, :, column == n].min(axis=2) / width[n] for n in range(len(width))], axis=2)
    solutions = [_solve_layer(layer, width * slots) for layer in least]
    lp_s, shares = zip(*solutions, strict=True)
    return Relaxation(np.array(lp_s), np.stack(shares), least, column)


def _columns(experts: int, topology: Topology) -> Ints:
    """Return [G], the column of each rank: as many blocks of a node's ranks as `_SMALL_LP` allows."""
    ranks_per_node = topology.ranks // topology.nodes
    allowed = _SMALL_LP // experts // topology.nodes
    blocks = min(ranks_per_node, max(allowed, 2 if topology.nodes == 1 else 1))
    column: Ints = (
        topology.node_of * blocks + np.arange(topology.ranks) % ranks_per_node * blocks // ranks_per_node
    )
    return column


def _solve_layer(price: Floats, room: Ints) -> tuple[float, Floats]:
    """Solve the LP of one layer; return the largest column's time, s, and x[E, N], the share of each expert.

    Args:
        price: [E, N].
        room: [N] slots.
    """
    experts, columns = price.shape
    scale = float(price.mean())
    if columns == 1 or not scale:
        return float(price[:, 0].sum()), np.tile(room / room.sum(), (experts, 1))
    n = experts * columns
    variable = np.arange(n)
    expert, column = np.divmod(variable, columns)
    rows = np.concatenate([column, np.arange(columns), columns + column])
    places = np.concatenate([variable, np.full(columns, n), variable])
    values = np.concatenate([price.reshape(-1) / scale, np.full(columns, -1.0), np.ones(n)])
    result = linprog(  # type: ignore[call-overload]  # its stubs know no sparse constraints
        np.append(np.zeros(n), 1.0),
        A_ub=csr_array((values, (rows, places)), shape=(2 * columns, n + 1)),
        b_ub=np.concatenate([np.zeros(columns), room]),
        A_eq=csr_array((np.ones(n), (expert, variable)), shape=(experts, n + 1)),
        b_eq=np.ones(experts),
        bounds=(0, None),
        method="highs",
    )
    if result.x is None:  # unreachable: even shares satisfy every constraint
        raise RuntimeError(f"the placement LP has no solution: {result.message}")
    return float(result.fun) * scale, result.x[:n].reshape(experts, columns)


def slots_bound(token_s: Floats, active_s: Floats, ranks: int, slots: int) -> Floats:
    """Return float[L], a lower bound of the time that holds because replicas are whole, s.

    Experts that must be split need slots. The bound is the least time with enough slots, found by bisection.
    Without spare slots, the rank of the most expensive expert also holds others.
    """
    if ranks * slots == token_s.shape[1]:
        whole = np.sort(token_s + active_s, axis=1)
        least: Floats = whole[:, -1] + whole[:, : slots - 1].sum(axis=1)
        return least
    low, high = np.zeros(len(token_s)), (token_s + active_s).max(axis=1)
    for _ in range(40):
        middle = (low + high) / 2
        spent = np.maximum(middle[:, None] - active_s, 0)
        with np.errstate(divide="ignore", invalid="ignore"):
            needed = np.where(token_s > 0, np.ceil(token_s / spent - 1e-9), 1.0)
        fits = np.maximum(needed, 1).sum(axis=1) <= ranks * slots
        low, high = np.where(fits, low, middle), np.where(fits, middle, high)
    return low
