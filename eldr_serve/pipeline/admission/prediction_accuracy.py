"""The accuracy of earlier predictions of latencies, and the number of running requests."""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable

WINDOW_S = 60.0  # older errors are dropped, except the newest _MIN_ERRORS
_MAX_ERRORS = 512
_MIN_ERRORS = 8  # with fewer errors there is no margin; the newest ones count at any age
_MAX_NEAREST = 80  # number of errors from which a margin is taken, those at the nearest loads
# Share of requests whose latency is to be within prediction and margin. 0.975 squared is 0.95: both bounds
# hold for about 95 %.
_COVERED_SHARE = 0.975


class PredictionAccuracy:
    """Accuracy of the predictions of one latency, by the load at which they were made.

    Since predictions for a busy service err more, a single margin would let errors made under overload cause
    refusals even when the service is idle. A margin is therefore taken from requests at similar loads, and
    errors at a higher load are reduced in proportion to that load.

    Args:
        clock: returns the time, s.

    Attributes:
        num_measured: number of requests whose latency was predicted and measured.
        num_met: number of measured requests whose latency met the objective.
        predicted_s, measured_s, error_s: sums of the predictions, the measurements and their absolute
            differences over the measured requests, s.
        last_margin_s: the margin that was asked for last, s.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self.num_measured = self.num_met = 0
        self.predicted_s = self.measured_s = self.error_s = self.last_margin_s = 0.0
        self._clock = clock
        # Time, load, measured - predicted.
        self._errors: deque[tuple[float, float, float]] = deque(maxlen=_MAX_ERRORS)

    def record(self, predicted_s: float, measured_s: float, objective_s: float, load: float) -> None:
        """Record the latency of a finished request that was served at this load."""
        self.num_measured += 1
        if measured_s <= objective_s:
            self.num_met += 1
        self.predicted_s += predicted_s
        self.measured_s += measured_s
        self.error_s += abs(measured_s - predicted_s)
        self._errors.append((self._clock(), load, measured_s - predicted_s))

    def compute_margin_s(self, load: float) -> float:
        """Return what to add to a prediction at this load to cover 97.5 % of recent requests, s.

        It is negative if nearly all predictions were too long, and 0 with few requests. After a pause it
        is taken from the newest requests before the pause, so that a burst is not admitted as a whole.
        """
        since_s = self._clock() - WINDOW_S
        while len(self._errors) > _MIN_ERRORS and self._errors[0][0] < since_s:
            self._errors.popleft()
        self.last_margin_s = 0.0
        if len(self._errors) >= _MIN_ERRORS:
            nearest = heapq.nsmallest(
                _MAX_NEAREST, reversed(self._errors), key=lambda item: abs(item[1] - load)
            )
            errors = sorted(e * min(1.0, load / its_load) if e > 0 else e for _, its_load, e in nearest)
            self.last_margin_s = errors[min(math.ceil(_COVERED_SHARE * (len(errors) + 1)), len(errors)) - 1]
        return self.last_margin_s

    def status(self) -> dict[str, float]:
        """Return counts, sums and the margin as JSON types."""
        return {
            "requests": self.num_measured,
            "met": self.num_met,
            "predicted_s": round(self.predicted_s, 6),
            "measured_s": round(self.measured_s, 6),
            "error_s": round(self.error_s, 6),
            "margin_s": round(self.last_margin_s, 6),
        }


class ConcurrencyMeter:
    """Number of running requests, and its mean over the time of each.

    Args:
        clock: returns the time, s.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self.running = 0
        self._clock = clock
        self._advanced_at_s = 0.0
        self._request_s = 0.0  # integral of running requests over time, up to `_advanced_at_s`

    def start(self) -> float:
        """Count a request that starts; return the mark of this moment for `mean`."""
        self._advance()
        self.running += 1
        return self._request_s

    def end(self) -> None:
        """Count a request that ends."""
        self._advance()
        self.running -= 1

    def mean(self, mark: float, seconds: float) -> float:
        """Return the mean number of running requests in the seconds since a mark."""
        self._advance()
        return (self._request_s - mark) / seconds if seconds > 0 else float(self.running)

    def _advance(self) -> None:
        now_s = self._clock()
        self._request_s += self.running * (now_s - self._advanced_at_s)
        self._advanced_at_s = now_s
