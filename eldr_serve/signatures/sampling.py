"""Control the share of requests that engines sample, so that an actor gets samples at a steady rate."""

from __future__ import annotations

import time
from collections.abc import Callable

_PERIOD_S = 5.0
_MIN_SHARE = 1e-4


class SampleShare:
    """Adjusts the share to the request rate, which is estimated as samples/s divided by the share.

    Args:
        rate: desired number of samples, 1/s.
    """

    def __init__(self, rate: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.rate = rate
        self.all = True  # sample every request
        self._share = 1.0
        self._clock = clock
        self._since = clock()
        self._samples = 0

    @property
    def now(self) -> float:
        """Return the share of requests to sample next."""
        return 1.0 if self.all else self._share

    def count(self, samples: int) -> None:
        """Count new samples, and adjust the share every few seconds."""
        self._samples += samples
        now = self._clock()
        passed = now - self._since
        if passed < _PERIOD_S:
            return
        requests = self._samples / passed / self.now
        self._share = max(_MIN_SHARE, min(1.0, self.rate / requests if requests else 1.0))
        self._since, self._samples = now, 0
