"""A rate limit."""

from __future__ import annotations

import math
import time
from collections.abc import Callable


class Rate:
    """A token bucket with the capacity of one second, and at least one token.

    Args:
        per_s: tokens/s; 0: nothing is allowed.
    """

    def __init__(self, per_s: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._per_s = per_s
        self._capacity = max(per_s, 1.0) if per_s else 0.0
        self._clock = clock
        self._left, self._at_s = self._capacity, clock()

    def reserve(self, within_s: float) -> float | None:
        """Reserve a token after all earlier reservations; return the seconds until it is available.

        Reserve nothing and return None if that is longer than `within_s`.
        """
        now = self._clock()
        self._left = min(self._left + (now - self._at_s) * self._per_s, self._capacity)
        self._at_s = now
        after_s = max(0.0, 1 - self._left) / self._per_s if self._per_s else math.inf
        if after_s > within_s:
            return None
        self._left -= 1
        return after_s

    def give_back(self) -> None:
        """Cancel a reservation."""
        self._left += 1
