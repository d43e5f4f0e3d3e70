"""Affinity profiles: the kind of requests that each worker has recently received."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from eldr_serve.scheduling.activation import extend_rows

_TIME_CONSTANT = 32  # requests over which the mean is taken


class AffinityProfiles:
    """Exponentially weighted mean of the activation deviations of the requests placed on each worker.

    A request's activation deviation is the unit vector of its activation minus the recent mean. Nothing is
    fitted in advance, because workers specialise online and follow changes of the traffic.

    Attributes:
        vectors: float32[W, C], the profile of each worker; zeros for unused ones. C cells, in any order.
    """

    def __init__(self) -> None:
        self.vectors = np.zeros((0, 0), np.float32)
        self._length = np.zeros(0, np.float32)
        self._num_observed = np.zeros(0, np.int64)  # number of requests

    def grow(self, num_workers: int, num_cells: int) -> None:
        """Extend the arrays to at least this number of workers."""
        if num_workers > len(self.vectors):
            self.vectors = extend_rows(self.vectors, num_workers, num_cells)
            self._length = extend_rows(self._length, num_workers)
            self._num_observed = extend_rows(self._num_observed, num_workers)

    def learn(self, position: int, deviation: NDArray[np.float32]) -> int:
        """Add a request's activation deviation, float32[C]; return the request's number at the worker."""
        self.grow(position + 1, len(deviation))
        self._add(position, (deviation - self.vectors[position]) / np.float32(_TIME_CONSTANT))
        self._num_observed[position] += 1
        return int(self._num_observed[position])

    def correct(self, position: int, number: int, change: NDArray[np.float32]) -> None:
        """Add `change`, float32[C], to the deviation that was learnt under this number."""
        share = (1 - 1 / _TIME_CONSTANT) ** int(self._num_observed[position] - number) / _TIME_CONSTANT
        self._add(position, change * np.float32(share))

    def _add(self, position: int, change: NDArray[np.float32]) -> None:
        profile = self.vectors[position]
        profile += change
        self._length[position] = np.linalg.norm(profile)

    def cosine(self, positions: NDArray[np.int64], dot_products: NDArray[np.float32]) -> NDArray[np.float64]:
        """Return the cosines of profiles with a deviation, float64[n]; 0 for unused workers.

        Args:
            dot_products: float32[n], the product of each worker's profile and the deviation.
        """
        length = self._length[positions]
        return np.divide(dot_products, length, out=np.zeros(len(positions)), where=length > 0)


def deviation_of(activation: NDArray[np.float32], mean: NDArray[np.float32]) -> NDArray[np.float32] | None:
    """Return the unit vector of activation - mean, float32[C]; None if they are equal."""
    difference = activation - mean
    length = np.linalg.norm(difference)
    if not length:
        return None
    difference /= length
    return difference
