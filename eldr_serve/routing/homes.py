"""What kind of request each worker has taken of late."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from eldr_serve.routing.activation import grown

_MEMORY = 32  # requests; what came before counts for a third


class Homes:
    """A request's bent is how its activation differs from the mean of recent requests, as a unit vector.

    A worker's home is the mean bent of what was placed there, older requests fading. Nothing is fitted:
    workers that happen to draw like requests keep to them, and follow the traffic when it changes.

    Attributes:
        home: float32[W, C], zeros where nothing was placed yet; C cells, in any order.
    """

    def __init__(self) -> None:
        self.home = np.zeros((0, 0), np.float32)
        self._length = np.zeros(0, np.float32)

    def grow(self, workers: int, cells: int) -> None:
        """There are at least so many workers."""
        if workers > len(self.home):
            self.home = grown(self.home, workers, cells)
            self._length = grown(self._length, workers)

    def learn(self, worker: int, bent: NDArray[np.float32]) -> None:
        """A request of that bent, float32[C], was placed there."""
        self.grow(worker + 1, len(bent))
        home = self.home[worker]
        home += (bent - home) / np.float32(_MEMORY)
        self._length[worker] = np.linalg.norm(home)

    def cosine(self, workers: NDArray[np.int64], along: NDArray[np.float32]) -> NDArray[np.float64]:
        """float64[n], of the homes with a bent that `along`, home @ bent of each worker, was made from.

        0 where nothing was placed yet.
        """
        length = self._length[workers]
        return np.divide(along, length, out=np.zeros(len(workers)), where=length > 0)


def bent_of(p: NDArray[np.float32], mean: NDArray[np.float32]) -> NDArray[np.float32] | None:
    """float32[C] of length 1; None where the request is like the mean."""
    difference = p - mean
    length = np.linalg.norm(difference)
    if not length:
        return None
    difference /= length
    return difference
