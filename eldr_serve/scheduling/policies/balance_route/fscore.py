"""BalanceRoute's F-score and the best set of requests under it (paper, sections 3.1, 4.1, D.4)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

MAX_CANDIDATES = 12  # requests whose subsets are enumerated: at most 4,095


@dataclass(frozen=True)
class FScore:
    """F(s) = beta * s * sum_h w[h] - alpha * sum_h w[h] * max(0, s - m[h]), tokens.

    s is the number of KV tokens of the admitted requests, m[h] is the worker's margin h decode steps ahead:
    the difference between the heaviest worker's load and its own. Tokens within the margins balance the
    workers; tokens beyond them delay all others.

    Attributes:
        weights: w, float64[H+1], discount of each step ahead.
        alpha, beta: cost per token of overflow and gain per admitted token.
    """

    weights: NDArray[np.float64]
    alpha: float
    beta: float

    @cached_property
    def gain(self) -> float:
        """Return F of one token within the margins."""
        return self.beta * float(self.weights.sum())

    @classmethod
    def build_current(cls, num_workers: int) -> FScore:
        """Return the score of BR-0: s - G * max(0, s - m), the decrease of G * max(L) - sum(L)."""
        return cls(np.ones(1), float(num_workers), 1.0)

    @classmethod
    def build_horizon(cls, horizon: int, gamma: float, alpha: float, beta: float) -> FScore:
        """Return the score of BR-H: w[h] = gamma ** h, h = 0 .. horizon."""
        return cls(np.power(gamma, np.arange(horizon + 1.0)), alpha, beta)

    def __call__(self, added: ArrayLike, margins: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return F of added[..., H+1] tokens h steps ahead at margins[..., H+1]; leading axes broadcast.

        In the paper s is the same at every h; here a request may add nothing after its expected end.
        """
        added = np.asarray(added, np.float64)
        score: NDArray[np.float64] = self.beta * (added @ self.weights) - self.alpha * (
            np.maximum(added - margins, 0.0) @ self.weights
        )
        return score


def best_subset(
    added: NDArray[np.float64], limit: int, score: FScore, margins: NDArray[np.float64]
) -> tuple[list[int], float]:
    """Return the set of 1 to `limit` requests with the largest F, and its F.

    Args:
        added: float64[n, H+1], each request's tokens; n <= MAX_CANDIDATES if limit is above 1.
        margins: float64[H+1], margins of the worker.

    Returns:
        (positions in `added`, F).
    """
    if limit == 1:
        scores = score(added, margins)
        best = int(scores.argmax())
        return [best], float(scores[best])
    # Enumerate all sets. With a cached table this is faster than subset sums in a bitset, whose cost grows
    # with the prompts' length, and which cannot handle tokens that differ between steps.
    members = _subsets(len(added), min(limit, len(added)))
    scores = score(members @ added, margins)
    best = int(scores.argmax())
    return np.flatnonzero(members[best]).tolist(), float(scores[best])


@lru_cache(maxsize=4 * MAX_CANDIDATES**2)
def _subsets(n: int, limit: int) -> NDArray[Any]:
    """Return the membership matrix of all sets of 1 to `limit` of n, float64[S, n], larger sets last."""
    sets = np.arange(1, 1 << n)
    size = np.bitwise_count(sets)
    sets = sets[np.argsort(size, kind="stable")][: np.count_nonzero(size <= limit)]
    return ((sets[:, None] >> np.arange(n)) & 1).astype(np.float64)
