"""A bound on how often something is done."""

from __future__ import annotations

import math
import time
from collections.abc import Callable


class Rate:
    """A token bucket that holds what comes in one second, and at least one.

    Args:
        per_s: how often in a second; 0: never.
    """

    def __init__(self, per_s: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._per_s = per_s
        self._most = max(per_s, 1.0) if per_s else 0.0
        self._clock = clock
        self._left, self._at_s = self._most, clock()

    def reserve(self, within_s: float) -> float | None:
        """Seconds until it may be done, after all that was reserved before; then it is counted.

        None if that is later than in `within_s`.
        """
        now = self._clock()
        self._left = min(self._left + (now - self._at_s) * self._per_s, self._most)
        self._at_s = now
        after_s = max(0.0, 1 - self._left) / self._per_s if self._per_s else math.inf
        if after_s > within_s:
            return None
        self._left -= 1
        return after_s

    def give_back(self) -> None:
        """What was reserved is not done."""
        self._left += 1
