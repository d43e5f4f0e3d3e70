"""Background work is started again after it has failed."""

import asyncio
import logging
from collections import Counter

import pytest

from eldr_serve.monitoring.supervision import supervise


async def test_failed_work_is_logged_counted_and_started_again(caplog: pytest.LogCaptureFixture) -> None:
    starts, failures = 0, Counter[str]()

    async def fail_twice() -> None:
        nonlocal starts
        starts += 1
        if starts < 3:
            raise ValueError(f"failure {starts}")

    with caplog.at_level(logging.ERROR):
        await supervise("the export", fail_twice, delay_s=0.0, count=lambda name: failures.update([name]))
    assert (starts, failures) == (3, {"the export": 2})
    assert caplog.messages == ["the export failed; it starts again in 0 s"] * 2
    assert "ValueError: failure 1" in caplog.text


async def test_cancelled_work_is_not_started_again() -> None:
    started = asyncio.Event()

    async def run() -> None:
        assert not started.is_set()
        started.set()
        await asyncio.Event().wait()

    task = asyncio.create_task(supervise("the export", run, delay_s=0.0))
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
