"""The active experts of a batch of observed requests."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from offline.simulation.requests import Experts


def active_experts(
    experts: Experts, kinds: NDArray[np.int64], batch: int, rng: np.random.Generator, draws: int = 64
) -> float:
    """Return the mean over draws of a step's active experts, summed over layers, with `batch` requests."""
    steps = (experts.bits[experts.offset[rng.choice(kinds, batch)]] for _ in range(draws))
    return float(np.mean([np.bitwise_count(np.bitwise_or.reduce(step)).sum() for step in steps]))
