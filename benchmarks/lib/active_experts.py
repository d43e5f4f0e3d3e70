"""The active experts of a batch of observed requests."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from offline.simulation.requests import Experts


def active_experts(
    experts: Experts, requests: NDArray[np.int64], batch: int, rng: np.random.Generator, draws: int = 64
) -> float:
    """Return the mean number of active experts of a step, summed over layers, over random batches.

    Args:
        requests: indices in `experts` of the requests to draw from, with replacement.
        batch: number of requests of a step.
        draws: number of random batches.
    """
    steps = (experts.bits[experts.offset[rng.choice(requests, batch)]] for _ in range(draws))
    return float(np.mean([np.bitwise_count(np.bitwise_or.reduce(step)).sum() for step in steps]))
