"""The share of requests that engines sample, controlled so that an actor gets samples at a steady rate."""

from __future__ import annotations

import time
from collections.abc import Callable

_PERIOD_S = 5.0
_MIN_SHARE = 1e-4


class SampleShare:
    """A share that follows the rate of requests, estimated as samples/s divided by the share.

    Attributes:
        rate: desired number of samples, 1/s.
        sample_all: whether every request is sampled, whatever the rate.
    """

    def __init__(self, rate: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.rate = rate
        self.sample_all = True
        self._share = 1.0
        self._clock = clock
        self._started_at_s = clock()
        self._samples = 0

    @property
    def current(self) -> float:
        """Return the share of requests to sample next."""
        return 1.0 if self.sample_all else self._share

    def count(self, samples: int) -> None:
        """Count new samples, and adjust the share every few seconds."""
        self._samples += samples
        now_s = self._clock()
        elapsed_s = now_s - self._started_at_s
        if elapsed_s < _PERIOD_S:
            return
        requests_per_s = self._samples / elapsed_s / self.current
        self._share = max(_MIN_SHARE, min(1.0, self.rate / requests_per_s if requests_per_s else 1.0))
        self._started_at_s, self._samples = now_s, 0
