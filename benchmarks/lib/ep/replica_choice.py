"""Baselines for METRO's greedy choice of the replica that serves an expert's tokens.

Arguments `tokens` and `hosts`, and errors, are those of `eldr_serve.experts.parallel.metro.route_metro`.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.sparse import csr_array
from scipy.sparse.csgraph import maximum_flow

from eldr_serve.arrays import Ints
from eldr_serve.experts.parallel.metro import parse_batch


def route_optimal(tokens: ArrayLike, hosts: ArrayLike) -> Ints:
    """Minimise the activated experts on the worst rank, with bipartite flows in a binary search.

    The optimum is a baseline and too slow for serving. Results and errors are those of `route_metro`.
    """
    count, is_host = parse_batch(tokens, hosts)
    rank = np.full(count.shape, -1, np.int64)
    for layer in range(len(count)):
        active = np.flatnonzero(count[layer] > 0)
        if len(active):
            rank[layer, active] = _flow(is_host[layer, active])
    return rank.reshape(np.shape(tokens))


def route_even(tokens: ArrayLike, hosts: ArrayLike, first: int = 0) -> Ints:
    """Spread tokens evenly over replicas, like EPLB: int[..., E, G].

    The hosts of an expert get the remainder in turn, from number `first` (modulo their number) on.
    """
    count, is_host = parse_batch(tokens, hosts)
    replicas = is_host.sum(axis=2)
    share, rest = np.divmod(count, np.maximum(replicas, 1))
    number = np.cumsum(is_host, axis=2) - 1  # 0 for the first host, 1 for the second, ...
    place = (number - first) % np.maximum(replicas, 1)[..., None]
    spread = np.where(is_host, share[..., None] + (place < rest[..., None]), 0)
    return spread.reshape((*np.shape(tokens), is_host.shape[2]))


def _flow(is_host: NDArray[np.bool_]) -> Ints:
    """Return int[n], a rank of is_host[n, G] for each expert, so that the fullest rank has the fewest."""
    n, ranks = is_host.shape
    low, high = -(-n // ranks), n
    best: Ints | None = None
    while low < high or best is None:
        bound = (low + high) // 2
        routing = _assign_within(is_host, bound)
        if routing is None:
            low = bound + 1
        else:
            best, high = routing, bound
    return best


def _assign_within(is_host: NDArray[np.bool_], bound: int) -> Ints | None:
    """Return an assignment with at most `bound` experts per rank, or None if there is none."""
    n, ranks = is_host.shape
    source, sink = n + ranks, n + ranks + 1
    expert, rank = np.nonzero(is_host)
    rows = np.concatenate([np.full(n, source), expert, n + np.arange(ranks)])
    columns = np.concatenate([np.arange(n), n + rank, np.full(ranks, sink)])
    capacity = np.concatenate([np.ones(n + len(expert)), np.full(ranks, bound)]).astype(np.int32)
    network = csr_array((capacity, (rows, columns)), shape=(n + ranks + 2, n + ranks + 2))
    result = maximum_flow(network, source, sink)
    if result.flow_value < n:
        return None
    return np.asarray(result.flow.toarray()[:n, n : n + ranks].argmax(axis=1))
