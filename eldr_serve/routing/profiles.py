"""Affinity profiles: what kind of request each worker has taken of late."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from eldr_serve.routing.activation import grown

_MEMORY = 32  # requests; what came before counts for a third


class AffinityProfiles:
    """A worker's affinity profile: the mean activation deviation of what was placed there, older ones fading.

    A request's activation deviation is the unit vector of its activation minus the recent mean. Nothing is
    fitted: workers specialise online, and follow the traffic when it changes.

    Attributes:
        profile: float32[W, C], zeros where nothing was placed yet; C cells, in any order.
    """

    def __init__(self) -> None:
        self.profile = np.zeros((0, 0), np.float32)
        self._length = np.zeros(0, np.float32)
        self._learnt = np.zeros(0, np.int64)  # requests

    def grow(self, workers: int, cells: int) -> None:
        """There are at least so many workers."""
        if workers > len(self.profile):
            self.profile = grown(self.profile, workers, cells)
            self._length = grown(self._length, workers)
            self._learnt = grown(self._learnt, workers)

    def learn(self, worker: int, deviation: NDArray[np.float32]) -> int:
        """A request of that activation deviation, float32[C], was placed there; its number there."""
        self.grow(worker + 1, len(deviation))
        self._add(worker, (deviation - self.profile[worker]) / np.float32(_MEMORY))
        self._learnt[worker] += 1
        return int(self._learnt[worker])

    def correct(self, worker: int, number: int, more: NDArray[np.float32]) -> None:
        """The deviation that was learnt there as this number lacked `more`, float32[C]."""
        share = (1 - 1 / _MEMORY) ** int(self._learnt[worker] - number) / _MEMORY
        self._add(worker, more * np.float32(share))

    def _add(self, worker: int, more: NDArray[np.float32]) -> None:
        profile = self.profile[worker]
        profile += more
        self._length[worker] = np.linalg.norm(profile)

    def cosine(self, workers: NDArray[np.int64], along: NDArray[np.float32]) -> NDArray[np.float64]:
        """float64[n], of the profiles with a deviation; 0 where nothing was placed yet.

        Args:
            along: float32[n], profile @ deviation of each worker.
        """
        length = self._length[workers]
        return np.divide(along, length, out=np.zeros(len(workers)), where=length > 0)


def deviation_of(p: NDArray[np.float32], mean: NDArray[np.float32]) -> NDArray[np.float32] | None:
    """float32[C] of length 1; None where the request is like the mean."""
    difference = p - mean
    length = np.linalg.norm(difference)
    if not length:
        return None
    difference /= length
    return difference
