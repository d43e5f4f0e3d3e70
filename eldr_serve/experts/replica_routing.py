"""Which replica serves an expert's tokens in one batch, so that no rank activates too many experts.

A decode step waits for its slowest rank, and a rank's time follows the expert replicas that it
activates (METRO, section III). All functions take `tokens` int[..., E], the batch's tokens of each
expert, and `hosts` bool[..., E, G], which ranks hold it; leading axes (layers) are independent.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.sparse import csr_array
from scipy.sparse.csgraph import maximum_flow

Ints = NDArray[np.int64]


def route_metro(tokens: ArrayLike, hosts: ArrayLike) -> Ints:
    """METRO's greedy (Algorithm 1): each expert in turn to the host with the fewest activated experts.

    Experts with fewer hosts choose first: who has no choice should not meet a rank that others could
    have left free. The paper leaves the order to the race of its threads.

    Returns:
        int[..., E] rank of each expert; -1 where it has no tokens.

    Raises:
        ValueError: shapes that do not agree, or an expert with tokens and no host.
    """
    count, held = _checked(tokens, hosts)
    experts = count.shape[1]
    rank = np.full(count.shape, -1, np.int64)
    activated = np.zeros((len(count), held.shape[2]), np.int64)
    layer = np.arange(len(count))
    order = np.argsort(held.sum(axis=2), axis=1, kind="stable")
    for turn in range(experts):
        expert = order[:, turn]
        wanted = count[layer, expert] > 0
        load = np.where(held[layer, expert], activated, np.iinfo(np.int64).max)
        choice = load.argmin(axis=1)
        rank[layer, expert] = np.where(wanted, choice, -1)
        activated[layer, choice] += wanted
    return rank.reshape(np.shape(tokens))


def route_optimal(tokens: ArrayLike, hosts: ArrayLike) -> Ints:
    """The fewest activated experts on the worst rank: bipartite flow under binary search of the bound.

    Returns and raises as `route_metro`; the yardstick, too slow to serve with.
    """
    count, held = _checked(tokens, hosts)
    rank = np.full(count.shape, -1, np.int64)
    for layer in range(len(count)):
        active = np.flatnonzero(count[layer] > 0)
        if len(active):
            rank[layer, active] = _flow(held[layer, active])
    return rank.reshape(np.shape(tokens))


def route_even(tokens: ArrayLike, hosts: ArrayLike) -> Ints:
    """EPLB's: an expert's tokens spread evenly over all its replicas.

    Returns:
        int[..., E, G] tokens by rank; a remainder goes to the first hosts, one each.
    """
    count, held = _checked(tokens, hosts)
    replicas = held.sum(axis=2)
    share, rest = np.divmod(count, np.maximum(replicas, 1))
    place = np.cumsum(held, axis=2) - 1  # 0 for the first host, 1 for the second, ...
    spread = np.where(held, share[..., None] + (place < rest[..., None]), 0)
    return spread.reshape((*np.shape(tokens), held.shape[2]))


def _checked(tokens: ArrayLike, hosts: ArrayLike) -> tuple[Ints, NDArray[np.bool_]]:
    count, held = np.asarray(tokens), np.asarray(hosts, bool)
    if held.ndim < 2 or count.shape != held.shape[:-1]:
        raise ValueError(f"tokens of shape {count.shape} do not go with hosts of shape {held.shape}")
    if count.size and count.min() < 0:
        raise ValueError("tokens must be 0 or more")
    experts, ranks = held.shape[-2:]
    count, held = count.reshape(-1, experts).astype(np.int64), held.reshape(-1, experts, ranks)
    homeless = np.argwhere((count > 0) & ~held.any(axis=2))
    if len(homeless):
        raise ValueError(f"expert {homeless[0][1]} has tokens and no rank holds it")
    return count, held


def _flow(held: NDArray[np.bool_]) -> Ints:
    """int[n] rank of each expert of held[n, G], with the least maximum."""
    n, ranks = held.shape
    low, high = -(-n // ranks), n
    best: Ints | None = None
    while low < high or best is None:
        bound = (low + high) // 2
        found = _within(held, bound)
        if found is None:
            low = bound + 1
        else:
            best, high = found, bound
    return best


def _within(held: NDArray[np.bool_], bound: int) -> Ints | None:
    """An assignment with at most `bound` experts a rank; None if there is none."""
    n, ranks = held.shape
    source, sink = n + ranks, n + ranks + 1
    expert, rank = np.nonzero(held)
    rows = np.concatenate([np.full(n, source), expert, n + np.arange(ranks)])
    columns = np.concatenate([np.arange(n), n + rank, np.full(ranks, sink)])
    capacity = np.concatenate([np.ones(n + len(expert)), np.full(ranks, bound)]).astype(np.int32)
    network = csr_array((capacity, (rows, columns)), shape=(n + ranks + 2, n + ranks + 2))
    result = maximum_flow(network, source, sink)
    if result.flow_value < n:
        return None
    assigned: Ints = result.flow.toarray()[:n, n : n + ranks].argmax(axis=1)
    return assigned
