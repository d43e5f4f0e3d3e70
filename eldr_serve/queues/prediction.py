"""Predicted latencies of a request, and the error of earlier predictions."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

WINDOW_S = 60.0  # older errors do not count, so that a disturbance is forgotten
_MAX_ERRORS = 256
_MIN_ERRORS = 8  # with fewer errors there is no margin
_SHARE = 0.95  # share of requests whose latency is within prediction and margin


@dataclass
class Prediction:
    """Predicted latencies of a request at its admission.

    Attributes:
        ttft_s: time to the first token, s, by each worker that may prefill the prompt; empty if unknown.
        tpot_s: time between tokens at the decode worker where it is shortest, s; None if unknown.
    """

    ttft_s: dict[str, float] = field(default_factory=dict)
    tpot_s: float | None = None


class PredictionError:
    """Error of the predictions of one latency.

    Args:
        clock: returns the time, s.

    Attributes:
        requests: number of requests whose latency was predicted and measured.
        met: number of these whose latency met the objective.
        predicted_s, measured_s, error_s: sums over these requests, of predictions, measurements and absolute
            differences, s.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self.requests = self.met = 0
        self.predicted_s = self.measured_s = self.error_s = 0.0
        self._clock = clock
        self._errors: deque[tuple[float, float]] = deque(maxlen=_MAX_ERRORS)  # time, measured - predicted

    def record(self, predicted_s: float, measured_s: float, objective_s: float) -> None:
        """Record the latency of a finished request."""
        self.requests += 1
        self.met += measured_s <= objective_s
        self.predicted_s += predicted_s
        self.measured_s += measured_s
        self.error_s += abs(measured_s - predicted_s)
        self._errors.append((self._clock(), measured_s - predicted_s))

    @property
    def margin_s(self) -> float:
        """Return what to add to a prediction so that 95 % of recent requests would have been within it, s.

        It is negative if nearly all predictions were too long, and 0 with few recent requests.
        """
        since_s = self._clock() - WINDOW_S
        while self._errors and self._errors[0][0] < since_s:
            self._errors.popleft()
        count = len(self._errors)
        if count < _MIN_ERRORS:
            return 0.0
        return sorted(error for _, error in self._errors)[min(math.ceil(_SHARE * (count + 1)), count) - 1]

    def status(self) -> dict[str, float]:
        """Return counts, sums and the margin as JSON types."""
        return {
            "requests": self.requests,
            "met": self.met,
            "predicted_s": round(self.predicted_s, 6),
            "measured_s": round(self.measured_s, 6),
            "error_s": round(self.error_s, 6),
            "margin_s": round(self.margin_s, 6),
        }
