"""The estimated wait of a request in a queue, from how fast the queue has moved."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable

_MAX_DEPARTURES = 32  # number of departures kept
_MIN_DEPARTURES = 4  # departures needed for an estimate


class WaitEstimator:
    """Estimates waits in one queue from the mean time between its recent departures.

    Departures from before the queue was last empty do not count, since no request waited while it was empty.
    The time since the newest departure counts as a whole interval, so that a queue that does not move has
    longer estimates.
    If the departures are random (a Poisson process), this is unbiased at a time that does not depend on them.
    Just after one of n departures the estimate is 1/n too small.

    Args:
        clock: returns the time, s.
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._departures: deque[float] = deque(maxlen=_MAX_DEPARTURES)

    def record_departure(self, *, empty: bool) -> None:
        """Record that a request has left the queue; start over if the queue is empty."""
        if empty:
            self._departures.clear()
        else:
            self._departures.append(self._clock())

    def estimate_wait_s(self, ahead: float) -> float:
        """Estimate the time until `ahead` requests have left, s; 0 if too few have left so far."""
        num_departures = len(self._departures)
        if num_departures < _MIN_DEPARTURES:
            return 0.0
        return ahead * (self._clock() - self._departures[0]) / num_departures

    def retry_after_s(self, ahead: float) -> int:
        """Return the Retry-After for a request that is refused with `ahead` requests before it, s."""
        return max(1, math.ceil(self.estimate_wait_s(ahead)))
