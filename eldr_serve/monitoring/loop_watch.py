"""The stalls of this process's event loop, and the number of its tasks."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from eldr_serve.metrics import LOOP, PROCESS, STALL_S
from eldr_serve.monitoring.ray_metrics import PERIOD_S, StatusMetrics

_TICK_S = 0.1


class LoopMetrics:
    """Metrics of one process's event loop."""

    def __init__(self) -> None:
        self._metrics = StatusMetrics(PROCESS)

    def export(self, role: str, status: Mapping[str, Any]) -> None:
        """Export the status of the loop."""
        for key, metric in LOOP.items():
            self._metrics.export(metric, status[key], role=role)


class LoopWatch:
    """Detects stalls of an event loop by delays of a timer; a measured stall is up to `_TICK_S` too short.

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
        self._metrics = self._metrics or LoopMetrics()  # kept if this runs again after a failure
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
