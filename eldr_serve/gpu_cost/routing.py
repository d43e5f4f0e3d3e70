"""Active experts of a layer in a step: in NVIDIA's measurements, and in real steps at worst.

NVIDIA measured each MoE kernel with two kinds of routing. Both are reproduced here from the collector
(github.com/ai-dynamo/aiconfigurator, collector/helper.py: balanced_logits and power_law_logits_v3). Under
expert parallelism the figures are of one rank: the first with even routing, and the rank with the most tokens
with skewed routing.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from eldr_serve.arrays import Ints
from eldr_serve.gpu_cost.readings import Routing, Shape

_DRAWS = 60


def active_experts(requests: int, routing: Routing, shape: Shape) -> float:
    """Return the active experts of a layer in a step of NVIDIA's package.

    Even routing is exact. The package's skewed times are means over five unseeded draws, so the result for
    skewed routing is an expectation.
    """
    if routing == "even":
        return float(_count_even(requests, shape))
    return _mean_skewed(requests, shape)


@lru_cache(maxsize=1024)
def independent_experts(requests: int, shape: Shape) -> float:
    """Return the mean active experts of a layer if each request draws its experts on its own, uniformly.

    Under expert parallelism, return the mean of the rank with the most active experts.
    Skewed routers activate fewer experts.
    """
    if shape.ranks == 1:
        return shape.experts * (1 - (1 - shape.top_k / shape.experts) ** requests)
    rng = np.random.default_rng(0)
    busiest = []
    for _ in range(_DRAWS):
        chosen = rng.random((requests, shape.experts)).argsort(axis=1)[:, : shape.top_k]
        busiest.append(np.bincount(np.unique(chosen) * shape.ranks // shape.experts).max())
    return float(np.mean(busiest))


def shared_experts(shape: Shape) -> float:
    """Return the active experts of a layer if all requests use the same ones, evenly over the ranks."""
    return float(-(-shape.top_k // shape.ranks))


def _count_even(requests: int, shape: Shape) -> int:
    stride = -(-shape.experts // shape.top_k)
    spread = 1.0 if requests >= stride else stride / requests
    positions = np.arange(requests)[:, None] * spread + np.arange(shape.top_k) * stride
    chosen = np.unique(positions.astype(np.int64) % shape.experts)
    return int(np.count_nonzero(chosen < shape.experts // shape.ranks))


@lru_cache(maxsize=1024)
def _mean_skewed(requests: int, shape: Shape) -> float:
    rng = np.random.default_rng(0)
    return float(np.mean([np.count_nonzero(_draw_tokens(requests, shape, rng)) for _ in range(_DRAWS)]))


def _draw_tokens(requests: int, shape: Shape, rng: np.random.Generator) -> Ints:
    """Return the tokens of each expert of the rank with the most tokens, in one draw."""
    pairs = requests * shape.top_k
    low, high = (1.0, requests * 0.8) if pairs > shape.experts else (0.01, 2.0)
    power = 1 - shape.skew
    weights = (low**power + rng.random(shape.experts) * (high**power - low**power)) ** (1 / power)
    tokens = np.rint(weights / weights.sum() * pairs).astype(np.int64)
    excess = int(np.maximum(tokens - requests, 0).sum())
    ranks = np.minimum(tokens, requests).reshape(shape.ranks, -1)
    _adjust(ranks, excess, requests)
    _adjust(ranks, pairs - int(ranks.sum()), requests)
    busiest: Ints = ranks[ranks.sum(axis=1).argmax()]
    return busiest


def _adjust(ranks: Ints, tokens: int, most: int) -> None:
    """Add tokens in place, or remove them if `tokens` is negative.

    The ranks take turns. Each adds a token to its least loaded expert below `most`, or removes one from
    its most loaded expert.
    """
    step, remaining = (1 if tokens > 0 else -1), abs(tokens)
    while remaining:
        before = remaining
        for rank in ranks:
            allowed = np.flatnonzero(rank < most if step > 0 else rank > 0)
            if remaining and len(allowed):
                rank[allowed[(step * rank[allowed]).argmin()]] += step
                remaining -= 1
        if remaining == before:
            return
