"""The stalls of this process's event loop, and the number of its tasks."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from eldr_serve.metrics import GAUGE, LOOP, PROCESS, STALL_S
from eldr_serve.monitoring.ray_metrics import PERIOD_S, SMALLEST, ray_metrics

_TICK_S = 0.1


class LoopMetrics:
    """Metrics of one process's event loop."""

    def __init__(self) -> None:
        self._ray_metrics = ray_metrics(PROCESS)
        self._exported = dict.fromkeys(LOOP, 0.0)  # values of the counters, by key

    def export(self, role: str, status: Mapping[str, Any]) -> None:
        """Export the status of the loop."""
        tags = {"role": role}
        for key, metric in LOOP.items():
            if metric.kind == GAUGE:
                self._ray_metrics[metric.name].set(float(status[key]), tags)
            elif more := max(status[key], SMALLEST) - self._exported[key]:
                self._ray_metrics[metric.name].inc(more, tags)
                self._exported[key] += more


class LoopWatch:
    """Detects stalls of an event loop by delays of a timer; it measures up to `_TICK_S` less than a stall.

    A loop stalls while something in it computes or blocks without `await`, and while its process is stopped
    or gets no core.

    Args:
        role: role of this process, for the metrics.

    Attributes:
        stalls: number of stalls of at least STALL_S since the start.
        longest_s: longest stall since the start, s.
    """

    def __init__(self, role: str) -> None:
        self.role = role
        self.stalls = 0
        self.longest_s = 0.0
        self._metrics: LoopMetrics | None = None

    async def run(self) -> None:
        """Measure and export stalls until cancelled."""
        loop = asyncio.get_running_loop()
        self._metrics = self._metrics or LoopMetrics()  # the same if this runs again after a failure
        export_at_s = loop.time()
        while True:
            due_at_s = loop.time() + _TICK_S
            await asyncio.sleep(_TICK_S)
            late_s = loop.time() - due_at_s
            if late_s >= STALL_S:
                self.stalls += 1
            self.longest_s = max(self.longest_s, late_s)
            if due_at_s >= export_at_s:
                export_at_s = due_at_s + PERIOD_S
                self._metrics.export(self.role, self.status())

    def status(self) -> dict[str, Any]:
        """Return the measurements as JSON-able values."""
        return {
            "stalls": self.stalls,
            "longest_stall_s": round(self.longest_s, 3),
            "tasks": len(asyncio.all_tasks()),
        }
