"""Evaluation of a placement on observed routes: the `LayerWork` of batches that a rule serves.

A batch is one decode step of a data-parallel engine: its tokens are on the ranks in equal blocks.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import ArrayLike, NDArray

from eldr_serve.arrays import Ints
from eldr_serve.experts.calibration_trace import CalibrationTrace
from eldr_serve.experts.expert_placement import Topology
from eldr_serve.experts.parallel.metro import MetroPlan
from offline.expert_placement.cost import LayerCost, LayerWork

Bools = NDArray[np.bool_]
ReplicaRule = Callable[[int, Ints, Ints, Bools], Ints]
"""(layer, experts int[T,k], source int[T], hosts bool[E,G]) -> int[T,k], the rank that serves each pair."""


def sample_batches(trace: CalibrationTrace, requests: Ints, tokens: int, batches: int, *, seed: int) -> Ints:
    """Draw decode steps: each has one random step of each of `tokens` random requests.

    Args:
        requests: indices of the trace's requests to draw from, with replacement.

    Returns:
        int[batches, tokens, L, k].

    Raises:
        UserInputError: the trace has no routes, or these requests have no decode step.
    """
    rng = np.random.default_rng(seed)
    chosen = requests[trace.decode_steps[requests] > 0]
    ends = np.cumsum(trace.decode_steps[chosen], dtype=np.int64)
    routes = trace.decode_routes(chosen)
    request = rng.integers(len(chosen), size=(batches, tokens))
    first = ends[request] - trace.decode_steps[chosen[request]]
    return routes[rng.integers(first, ends[request])].astype(np.int64)


def serve_even(layer: int, experts: Ints, source: Ints, hosts: Bools) -> Ints:
    """Let the replicas of an expert take turns by the position of the token in the batch.

    vLLM's EPLB hashes the position first (see EvenSpread). With 2, 4 or 8 replicas the turns are the same.
    """
    replicas = hosts.sum(axis=1)
    ordered = np.argsort(~hosts, axis=1, kind="stable")  # hosts first
    turn = np.arange(len(experts))[:, None] % replicas[experts]
    ranks: Ints = ordered[experts, turn]
    return ranks


def metro_rule(hosts: ArrayLike) -> ReplicaRule:
    """Return METRO's rule for hosts bool[L, E, G]: in each batch all tokens of an expert use one replica."""
    plans = [MetroPlan.from_hosts(layer) for layer in np.asarray(hosts, bool)]
    return lambda layer, experts, source, layer_hosts: plans[layer].route(
        np.bincount(experts.reshape(-1), minlength=len(layer_hosts))
    )[experts]


def serve(batches: Ints, hosts: ArrayLike, topology: Topology, rule: ReplicaRule) -> Ints:
    """Return int[B, T, L, k], the rank that serves each pair of the batches under the rule.

    Args:
        hosts: bool[L, E, G].
    """
    hosted, source = np.asarray(hosts, bool), home_ranks(batches.shape[1], topology)
    ranks = np.empty_like(batches)
    for batch, experts in enumerate(batches):
        for layer in range(experts.shape[1]):
            ranks[batch, :, layer] = rule(layer, experts[:, layer], source, hosted[layer])
    return ranks


def home_ranks(tokens: int, topology: Topology) -> Ints:
    """Return int[T], the rank that has each token of a batch before the layer: equal blocks."""
    return np.arange(tokens) * topology.ranks // tokens


def work_of(
    batches: Ints, ranks: Ints, topology: Topology, *, num_experts: int, token_bytes: float = 1.0
) -> LayerWork:
    """Return the work of each batch in each layer, [B, L, G], with the ranks of `serve`.

    Args:
        token_bytes: bytes of a hidden state; 1 counts copies of tokens.
    """
    source = home_ranks(batches.shape[1], topology)
    work = [
        [
            LayerWork.from_dispatched(
                experts[:, layer],
                chosen[:, layer],
                source,
                topology,
                num_experts=num_experts,
                token_bytes=token_bytes,
            )
            for layer in range(experts.shape[1])
        ]
        for experts, chosen in zip(batches, ranks, strict=True)
    ]
    return LayerWork(
        *(
            np.array([[getattr(layer, name) for layer in batch] for batch in work])
            for name in ("activated", "tokens", "near_bytes", "far_bytes")
        )
    )


def forwarded_copies(ranks: Ints, topology: Topology) -> tuple[float, float]:
    """Return (near, far) copies per token and layer if a token is sent once to another node, then within it.

    This is GRACE-MoE's dispatch (section 5.1); `work_of` counts one copy to every rank on any node.
    """
    shape = ranks.shape[:3]
    visited = np.zeros((*shape, topology.ranks), bool)
    np.put_along_axis(visited, ranks, True, axis=-1)
    home = home_ranks(shape[1], topology)
    by_node = visited.reshape(*shape, topology.nodes, -1)
    is_other = topology.node_of[home][:, None] != np.arange(topology.nodes)  # [T, nodes]
    to_nodes = by_node.any(axis=-1) & is_other[:, None, :]
    at_home = visited[:, np.arange(shape[1]), :, home]  # [T, B, L]: the copy that is not sent
    near = visited.sum() - at_home.sum() - to_nodes.sum()
    return float(near / np.prod(shape)), float(to_nodes.sum() / np.prod(shape))


def evaluate(
    batches: Ints,
    hosts: ArrayLike,
    topology: Topology,
    rule: ReplicaRule,
    *,
    token_bytes: float = 1.0,
    cost: LayerCost | None = None,
) -> dict[str, float]:
    """Return means over batches [B, T, L, k] and layers if experts are on `hosts` bool[L, E, G].

    A pair is a token and one of its experts. The keys are:

    - experts_worst_rank, experts_mean_rank: activated expert replicas on the worst rank and on average.
    - token_skew: pairs on the busiest rank over the mean.
    - idle_pct: share of the ranks' time spent waiting if time is proportional to pairs.
    - load_std_pct: standard deviation over ranks of all batches' pairs, relative to their mean.
    - near_copies, far_copies: hidden states sent to other ranks of the node and to other nodes, per token
      and layer.
    - near_forwarded, far_forwarded: these numbers under the dispatch of `forwarded_copies`.
    - layer_us: time of a layer, if there is a cost.
    """
    hosted = np.asarray(hosts, bool)
    ranks = serve(batches, hosted, topology, rule)
    work = work_of(batches, ranks, topology, num_experts=hosted.shape[1], token_bytes=token_bytes)
    copies = batches.shape[1] * token_bytes
    total = work.tokens.sum(axis=0)
    near, far = forwarded_copies(ranks, topology)
    figures = {
        "experts_worst_rank": work.activated.max(axis=-1).mean(),
        "experts_mean_rank": work.activated.mean(),
        "token_skew": (work.tokens.max(axis=-1) / work.tokens.mean(axis=-1)).mean(),
        "idle_pct": 100 * (1 - work.tokens.mean(axis=-1) / work.tokens.max(axis=-1)).mean(),
        "load_std_pct": 100 * (total.std(axis=-1) / total.mean(axis=-1)).mean(),
        "near_copies": work.near_bytes.sum(axis=-1).mean() / copies,
        "far_copies": work.far_bytes.sum(axis=-1).mean() / copies,
        "near_forwarded": near,
        "far_forwarded": far,
    }
    if cost is not None:
        figures["layer_us"] = 1e6 * cost.layer_s(work).mean()
    return {key: float(value) for key, value in figures.items()}
