"""Stalls of an event loop are counted, whatever their cause."""

import asyncio
import random
import time
from typing import Any

import pytest

from eldr_serve.metrics import LOOP, STALL_S
from eldr_serve.monitoring import loop_watch
from eldr_serve.monitoring.loop_watch import LoopWatch
from tests.faults.virtual_time import VirtualLoop


class ExportedMetrics:
    def __init__(self) -> None:
        self.calls: list[tuple[str, dict[str, Any]]] = []

    def export(self, role: str, status: dict[str, Any]) -> None:
        self.calls.append((role, status))


@pytest.fixture
def exported(monkeypatch: pytest.MonkeyPatch) -> ExportedMetrics:
    metrics = ExportedMetrics()
    monkeypatch.setattr(loop_watch, "LoopMetrics", lambda: metrics)
    return metrics


def watch_stops(*stops_s: float) -> LoopWatch:
    """Watch a process that is stopped for these times."""
    watch = LoopWatch("ingress")
    loop = VirtualLoop(random.Random(0))  # type: ignore[abstract]

    async def main() -> None:
        process = loop.process("watched")
        process.run(loop.create_task, watch.run())
        for seconds in stops_s:
            await asyncio.sleep(3)
            loop.stop_process(process)
            await asyncio.sleep(seconds)
            loop.go_on(process)
        await asyncio.sleep(3)

    loop.run(main())
    return watch


def test_a_running_loop_has_no_stalls(exported: ExportedMetrics) -> None:
    watch = watch_stops()
    assert (watch.stalls, watch.longest_s) == (0, pytest.approx(0))
    assert [role for role, _ in exported.calls] == ["ingress"] * 3  # they are exported once per second


@pytest.mark.parametrize("stops_s", [[0.3], [0.7, 2.0, 0.2], [STALL_S + 0.1] * 3])
def test_stalls_are_counted_and_timed(stops_s: list[float], exported: ExportedMetrics) -> None:
    watch = watch_stops(*stops_s)
    assert watch.stalls == sum(seconds > STALL_S for seconds in stops_s)
    assert max(stops_s) - 0.1 <= watch.longest_s <= max(stops_s) + 1e-9
    assert exported.calls[-1][1]["stalls"] == watch.stalls


async def test_blocking_code_counts_as_a_stall(exported: ExportedMetrics) -> None:
    watch = LoopWatch("router")
    running = asyncio.create_task(watch.run())
    await asyncio.sleep(0)
    time.sleep(STALL_S + 0.2)
    while not exported.calls:
        await asyncio.sleep(0.01)
    assert watch.stalls == 1
    assert watch.status().keys() == LOOP.keys()
    assert watch.status()["tasks"] == 2
    running.cancel()
