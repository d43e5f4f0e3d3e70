"""BalanceRoute's F-score and the best set of requests under it (paper, sections 3.1, 4.1, D.4)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

MAX_CANDIDATES = 12  # requests whose subsets are enumerated: 4,095 at most


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

    @cached_property
    def gain(self) -> float:
        """Of one token that fits."""
        return self.beta * float(self.weights.sum())

    @classmethod
    def present(cls, num_workers: int) -> FScore:
        """BR-0: s - G * max(0, s - m), the fall of the imbalance G * max(L) - sum(L)."""
        return cls(np.ones(1), float(num_workers), 1.0)

    @classmethod
    def discounted(cls, horizon: int, gamma: float, alpha: float, beta: float) -> FScore:
        """BR-H: w[h] = gamma ** h, h = 0 .. horizon."""
        return cls(np.power(gamma, np.arange(horizon + 1.0)), alpha, beta)

    def __call__(self, added: ArrayLike, margins: NDArray[np.float64]) -> NDArray[np.float64]:
        """F of added[..., H+1], tokens given h steps ahead, at margins[..., H+1]; leading axes broadcast.

        The paper's s is the same at every h; here a request that is expected to end sooner adds nothing
        afterwards.
        """
        added = np.asarray(added, np.float64)
        score: NDArray[np.float64] = self.beta * (added @ self.weights) - self.alpha * (
            np.maximum(added - margins, 0.0) @ self.weights
        )
        return score


def best_subset(
    added: NDArray[np.float64], limit: int, score: FScore, margins: NDArray[np.float64]
) -> tuple[list[int], float]:
    """The set of 1 to `limit` of the requests with the largest F, and its F.

    Args:
        added: float64[n, H+1], each request's tokens; n <= MAX_CANDIDATES where limit is above 1.
        margins: float64[H+1] of the worker.

    Returns:
        (positions in `added`, F).
    """
    if limit == 1:
        scores = score(added, margins)
        best = int(scores.argmax())
        return [best], float(scores[best])
    # All sets are looked at: with the table of them at hand this takes less time than bitset subset sums,
    # which grow with the prompts' length, and does not need the tokens to be the same at every h.
    members = _subsets(len(added), min(limit, len(added)))
    scores = score(members @ added, margins)
    best = int(scores.argmax())
    return np.flatnonzero(members[best]).tolist(), float(scores[best])


@lru_cache(maxsize=4 * MAX_CANDIDATES**2)
def _subsets(n: int, limit: int) -> NDArray[Any]:
    """float64[S, n]: membership in each set of 1 to `limit` of n, larger sets last."""
    sets = np.arange(1, 1 << n)
    size = np.bitwise_count(sets)
    sets = sets[np.argsort(size, kind="stable")][: np.count_nonzero(size <= limit)]
    return ((sets[:, None] >> np.arange(n)) & 1).astype(np.float64)
