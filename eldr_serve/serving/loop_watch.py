"""How long the event loop of this process stands still, and how many tasks it has."""

from __future__ import annotations

import asyncio
from typing import Any

from eldr_serve.metrics import STALL_S
from eldr_serve.serving.watching import PERIOD_S, LoopMetrics

_TICK_S = 0.1


class LoopWatch:
    """One timer: a stall is how much later than due it comes, so up to `_TICK_S` of each is not seen.

    A loop stands still while something in it computes, or waits without `await`; and with its process, when
    that is stopped or gets no core.

    Args:
        role: of this process, for the metrics.

    Attributes:
        stalls: how often it stood still for STALL_S or longer, since this began.
        longest_s: the longest time that it stood still since then, s.
    """

    def __init__(self, role: str) -> None:
        self.role = role
        self.stalls, self.longest_s = 0, 0.0

    async def run(self) -> None:
        """Watch, and export what was seen, until cancelled."""
        loop, metrics = asyncio.get_running_loop(), LoopMetrics()
        export_at = loop.time()
        while True:
            due = loop.time() + _TICK_S
            await asyncio.sleep(_TICK_S)
            late_s = loop.time() - due
            self.stalls += late_s >= STALL_S
            self.longest_s = max(self.longest_s, late_s)
            if due >= export_at:
                export_at = due + PERIOD_S
                metrics.export(self.role, self.status())

    def status(self) -> dict[str, Any]:
        """JSON-able."""
        return {
            "stalls": self.stalls,
            "longest_stall_s": round(self.longest_s, 3),
            "tasks": len(asyncio.all_tasks()),
        }
