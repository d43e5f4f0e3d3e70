"""Durations of the stages between prefill and the first token, for `/eldr/status` and metrics."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import numpy as np

WINDOW = 256  # number of newest requests for the percentiles


class StageLatencies:
    """Durations of the stages of the newest requests, by name of the stage.

    Stages of a request: `prefill` (the prefill call), `place` (router), `first_token` (decode call to its
    first chunk: the stages `transport` and `first_token` of `DecodeStages` together), and `handover` (end of
    the last prefill to first decode chunk).

    Attributes:
        on_recorded: called with the stage's name and each of its durations, s.
    """

    def __init__(self) -> None:
        self._seconds: dict[str, deque[float]] = {}
        self._counts: dict[str, int] = {}
        self.on_recorded: Callable[[str, float], None] = lambda name, seconds: None

    def record(self, **seconds: float) -> None:
        """Add the durations of one request, s."""
        for name, value in seconds.items():
            self._seconds.setdefault(name, deque(maxlen=WINDOW)).append(value)
            self._counts[name] = self._counts.get(name, 0) + 1
            self.on_recorded(name, value)

    def median_s(self, name: str) -> float | None:
        """Return the median duration of a stage over the newest requests, s; None if there is none."""
        return float(np.median(self._seconds[name])) if name in self._seconds else None

    def summary(self) -> dict[str, dict[str, float]]:
        """Return each stage's number of requests, and the mean, p50 and p99 of its newest durations, ms."""
        stages = {}
        for name, recent in self._seconds.items():
            values = 1000 * np.asarray(recent)
            p50, p99 = np.percentile(values, [50, 99])
            stages[name] = {
                "count": self._counts[name],
                "mean_ms": round(float(values.mean()), 3),
                "p50_ms": round(float(p50), 3),
                "p99_ms": round(float(p99), 3),
            }
        return stages
