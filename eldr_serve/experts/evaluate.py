"""What a placement makes of observed routes: batches of tokens, served by a rule, as `LayerWork`.

A batch is one decode step of a data-parallel engine: its tokens are at home on the ranks in equal blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from eldr_serve.experts.cost import LayerCost, LayerWork, Topology
from eldr_serve.experts.replica_routing import route_metro

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
Rule = Callable[[int, Ints, Ints, Bools], Ints]
"""(layer, experts int[T,k], source int[T], hosts bool[E,G]) -> int[T,k], the rank that serves each pair."""


def sample_batches(
    routes: ArrayLike,
    offsets: ArrayLike,
    requests: Sequence[int] | Ints,
    tokens: int,
    batches: int,
    *,
    seed: int,
) -> Ints:
    """Decode steps of `tokens` requests each: a random step of each of as many random requests.

    Args:
        routes: [steps, L, k], offsets: [N+1], of a `CalibrationTrace`.
        requests: those to draw from, with replacement.

    Returns:
        int[batches, tokens, L, k].

    Raises:
        ValueError: none of the requests has a decode step.
    """
    start = np.asarray(offsets)
    chosen = np.asarray(requests, np.int64)
    chosen = chosen[start[chosen + 1] > start[chosen]]
    if not len(chosen):
        raise ValueError("no request has a decode step to evaluate on")
    rng = np.random.default_rng(seed)
    drawn = rng.choice(chosen, (batches, tokens))
    batch: Ints = np.asarray(routes)[rng.integers(start[drawn], start[drawn + 1])].astype(np.int64)
    return batch


def serve_even(layer: int, experts: Ints, source: Ints, hosts: Bools) -> Ints:
    """What vLLM's EPLB does: the tokens of an expert take its replicas in turn."""
    replicas = hosts.sum(axis=1)
    ordered = np.argsort(~hosts, axis=1, kind="stable")  # hosts first
    turn = np.arange(len(experts))[:, None] % replicas[experts]
    ranks: Ints = ordered[experts, turn]
    return ranks


def serve_metro(layer: int, experts: Ints, source: Ints, hosts: Bools) -> Ints:
    """METRO's: all tokens of an expert go to one replica, chosen for this batch."""
    ranks: Ints = route_metro(np.bincount(experts.reshape(-1), minlength=len(hosts)), hosts)[experts]
    return ranks


def work_of(
    batches: Ints, hosts: ArrayLike, topology: Topology, rule: Rule, *, token_bytes: float = 1.0
) -> LayerWork:
    """The work of each batch in each layer, [B, L, G].

    Args:
        batches: int[B, T, L, k], of `sample_batches`.
        hosts: bool[L, E, G].
        token_bytes: of a hidden state; 1 counts copies of tokens.
    """
    held = np.asarray(hosts, bool)
    tokens = batches.shape[1]
    source = np.arange(tokens) * topology.ranks // tokens
    work = [
        [
            LayerWork.dispatched(
                experts, rule(layer, experts, source, held[layer]), source, topology,
                num_experts=held.shape[1], token_bytes=token_bytes,
            )
            for layer, experts in enumerate(batch.transpose(1, 0, 2))
        ]
        for batch in batches
    ]  # fmt: skip
    return LayerWork(
        *(
            np.array([[getattr(layer, name) for layer in batch] for batch in work])
            for name in ("activated", "tokens", "near_bytes", "far_bytes")
        )
    )


def summary(
    work: LayerWork, tokens: int, *, token_bytes: float = 1.0, cost: LayerCost | None = None
) -> dict[str, Any]:
    """Means over batches and layers of the work of batches of `tokens` tokens.

    Keys: `experts_worst_rank` and `experts_mean_rank`, activated expert replicas; `token_skew`, pairs of
    token and expert on the busiest rank over the mean; `idle_pct`, share of the ranks' time that passes in
    waiting if time follows pairs; `load_std_pct`, standard deviation over ranks of all batches' pairs, of
    their mean; `near_copies` and `far_copies`, of hidden states to other ranks of the node and to other
    nodes, a token and layer; with a cost `layer_us`.
    """
    total = work.tokens.sum(axis=0)
    found = {
        "experts_worst_rank": float(work.activated.max(axis=-1).mean()),
        "experts_mean_rank": float(work.activated.mean()),
        "token_skew": float((work.tokens.max(axis=-1) / work.tokens.mean(axis=-1)).mean()),
        "idle_pct": float(100 * (1 - work.tokens.mean(axis=-1) / work.tokens.max(axis=-1)).mean()),
        "load_std_pct": float(100 * (total.std(axis=-1) / total.mean(axis=-1)).mean()),
        "near_copies": float(work.near_bytes.sum(axis=-1).mean() / (tokens * token_bytes)),
        "far_copies": float(work.far_bytes.sum(axis=-1).mean() / (tokens * token_bytes)),
    }
    if cost is not None:
        found["layer_us"] = float(1e6 * cost.layer_s(work).mean())
    return found
