"""A limit on the rate of calls."""

from __future__ import annotations

import math
from collections.abc import Callable


class CallRateLimiter:
    """Limits calls to a rate with a token bucket, which holds the tokens of one second, at least one.

    Args:
        per_s: calls per second; 0 if no call is allowed.
        clock: returns the time, s.
    """

    def __init__(self, per_s: float, *, clock: Callable[[], float]) -> None:
        self._per_s = per_s
        self._capacity = max(per_s, 1.0)
        self._clock = clock
        self._available, self._refilled_at_s = self._capacity, -math.inf

    def reserve(self, within_s: float) -> float | None:
        """Reserve a token after all earlier reservations; return the seconds until it is available.

        Reserve nothing and return None if that is longer than `within_s`.
        """
        if not self._per_s:
            return None
        now_s = self._clock()
        self._available = min(self._available + (now_s - self._refilled_at_s) * self._per_s, self._capacity)
        self._refilled_at_s = now_s
        after_s = max(0.0, 1 - self._available) / self._per_s
        if after_s > within_s:
            return None
        self._available -= 1
        return after_s

    def give_back(self) -> None:
        """Cancel a reservation."""
        self._available += 1
