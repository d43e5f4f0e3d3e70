"""Choice of a replica for each pair of token and expert: by weights, or the nearest (GRACE-MoE, 4.3).

For one layer: `experts` int[T, k], `source` int[T] home rank of each token, `hosts` bool[E, G], `weights`
float[G] more than 0. Both functions return int[T, k], the rank that serves each pair.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from eldr_serve.arrays import Floats, Ints
from eldr_serve.experts.expert_placement import Topology
from offline.expert_placement.evaluate import ReplicaRule

Bools = NDArray[np.bool_]


def polling_weights(load: ArrayLike, hosts: ArrayLike) -> Floats:
    """Return float[..., G]: the inverse of each rank's predicted load. Replicas share a load evenly.

    This is Eq. 3 for any number of replicated experts. W_p is W_r / (1 + n), the share of the replicated
    load, as the paper's text says. The paper's formula divides W_max instead.
    """
    hosted = np.asarray(hosts, bool)
    share = np.asarray(load, np.float64) / np.maximum(hosted.sum(axis=-1), 1)
    predicted: Floats = (share[..., None] * hosted).sum(axis=-2)
    weights: Floats = 1 / np.maximum(predicted, 1.0)
    return weights


def route_weighted(experts: Ints, hosts: Bools, weights: Floats, rng: np.random.Generator) -> Ints:
    """Choose randomly among all replicas by weight (Algorithm 3)."""
    return _draw(hosts[experts], weights, rng)


def route_local(
    experts: Ints, source: Ints, hosts: Bools, weights: Floats, topology: Topology, rng: np.random.Generator
) -> Ints:
    """Choose a replica on the token's rank, else on its node, else any, by weight (Algorithm 4)."""
    candidates = hosts[experts]  # [T, k, G]
    node = topology.node_of
    for near in (source[:, None] == np.arange(topology.ranks), node[source][:, None] == node):
        nearer = candidates & near[:, None, :]
        candidates = np.where(nearer.any(axis=2, keepdims=True), nearer, candidates)
    return _draw(candidates, weights, rng)


def weighted_rule(load: ArrayLike, hosts: ArrayLike, *, seed: int = 0) -> ReplicaRule:
    """Return the rule `route_weighted` with the polling weights of load [L, E] on hosts [L, E, G]."""
    weights, rng = polling_weights(load, hosts), np.random.default_rng(seed)
    return lambda layer, experts, _, layer_hosts: route_weighted(experts, layer_hosts, weights[layer], rng)


def local_rule(load: ArrayLike, hosts: ArrayLike, topology: Topology, *, seed: int = 0) -> ReplicaRule:
    """Return the rule `route_local` with the polling weights of load [L, E] on hosts [L, E, G]."""
    weights, rng = polling_weights(load, hosts), np.random.default_rng(seed)
    return lambda layer, experts, source, layer_hosts: route_local(
        experts, source, layer_hosts, weights[layer], topology, rng
    )


def _draw(candidates: Bools, weights: Floats, rng: np.random.Generator) -> Ints:
    """Draw one of the candidates [T, k, G] of each pair, in proportion to the ranks' weights."""
    # The probability that a rank has the shortest of exponential waiting times is proportional to its weight.
    waiting = rng.exponential(size=candidates.shape) / weights
    ranks: Ints = np.where(candidates, waiting, np.inf).argmin(axis=2)
    return ranks
