"""BalanceRoute's F-score and the best set of requests under it (paper, sections 3.1, 4.1, D.4)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

MAX_WINDOW = 12  # candidates whose subsets are enumerated: 4,095 at most


@dataclass(frozen=True)
class FScore:
    """F(s) = beta * s * sum_h w[h] - alpha * sum_h w[h] * max(0, s - m[h]), tokens.

    s is what a worker is given (the KV tokens of the requests admitted), m[h] is the worker's margin
    h decode steps ahead: by how much the heaviest worker's load exceeds its own. What fits into the
    margins brings the workers nearer to each other; what overflows keeps all others waiting.

    Attributes:
        weights: w, float64[H+1], discount of each step ahead.
        alpha, beta: what overflow costs and what filling gains.
    """

    weights: NDArray[np.float64]
    alpha: float
    beta: float

    @classmethod
    def present(cls, num_workers: int) -> FScore:
        """BR-0: s - G * max(0, s - m), the fall of the imbalance G * max(L) - sum(L)."""
        return cls(np.ones(1), float(num_workers), 1.0)

    @classmethod
    def discounted(cls, horizon: int, gamma: float, alpha: float, beta: float) -> FScore:
        """BR-H: w[h] = gamma ** h, h = 0 .. horizon."""
        return cls(np.power(gamma, np.arange(horizon + 1.0)), alpha, beta)

    def __call__(self, tokens: ArrayLike, margins: NDArray[np.float64]) -> NDArray[np.float64]:
        """F of tokens[...] at margins[..., H+1]; the leading axes broadcast."""
        tokens = np.asarray(tokens, np.float64)
        overflow = np.maximum(tokens[..., None] - margins, 0.0) @ self.weights
        score: NDArray[np.float64] = self.beta * self.weights.sum() * tokens - self.alpha * overflow
        return score

    def peak(self, margins: NDArray[np.float64]) -> float:
        """The largest s that maximises F at margins[H+1]; infinite where overflow costs too little.

        F is concave: it falls from the margin at which the weights overflown outweigh the gain. So of any
        set of sums the best is one of the two next to the peak, on this side and on that.
        """
        order = np.argsort(margins)
        cost = self.alpha * np.cumsum(self.weights[order])
        first = int(np.searchsorted(cost, self.beta * self.weights.sum(), side="right"))
        return float(margins[order[first]]) if first < len(order) else float("inf")


def best_subset(
    tokens: NDArray[np.float64], limit: int, score: FScore, margins: NDArray[np.float64]
) -> tuple[list[int], float]:
    """The set of 1 to `limit` of the requests with the largest F, and its F.

    Args:
        tokens: float64[n], each request's, n <= MAX_WINDOW.
        margins: float64[H+1] of the worker.

    Returns:
        (positions in `tokens`, F).
    """
    members = _subsets(len(tokens), min(limit, len(tokens)))
    # All sums are looked at: with the table of subsets at hand this takes a third of the time of bitset
    # subset sums, which also grows with the prompts' length.
    sums = members @ tokens
    peak = score.peak(margins)
    safe = sums <= peak
    below = int(np.where(safe, sums, -np.inf).argmax())
    above = int(np.where(safe, np.inf, sums).argmin())
    scores = score(sums[[below, above]], margins)
    best = below if scores[0] >= scores[1] else above
    return np.flatnonzero(members[best]).tolist(), float(scores.max())


@lru_cache(maxsize=4 * MAX_WINDOW**2)
def _subsets(n: int, limit: int) -> NDArray[Any]:
    """float64[S, n]: membership in each set of 1 to `limit` of n, larger sets last."""
    sets = np.arange(1, 1 << n)
    size = np.bitwise_count(sets)
    sets = sets[np.argsort(size, kind="stable")][: np.count_nonzero(size <= limit)]
    return ((sets[:, None] >> np.arange(n)) & 1).astype(np.float64)
