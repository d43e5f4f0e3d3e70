"""When decode replicas with more calls than slots start on a call, on virtual time."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from eldr_serve.engine.report_fields import SLOTS
from eldr_serve.fleet.decode_start import DecodeStartEstimator
from eldr_serve.queues.call_start import WaitingCall
from eldr_serve.queues.reports import QueueReport
from tests.support.request_path import on_virtual_time


class Replicas:
    """A stand-in for a Fleet and its directory. Each replica has two slots."""

    def __init__(self, **calls: int) -> None:
        self.calls = calls
        self.live_workers = list(calls)
        self.metadata = {name: {SLOTS: 2} for name in calls}
        self.reports: dict[str, QueueReport] = {}
        self.directory = self

    def slot_calls_of(self, worker: str) -> int:
        return self.calls[worker]


def run(main: Callable[[Any, DecodeStartEstimator], Any], **calls: int) -> None:
    """Run a test on virtual time, over replicas with so many calls of this process that need a slot."""

    async def with_estimator() -> None:
        replicas: Any = Replicas(**calls)
        await main(replicas, DecodeStartEstimator(replicas))

    on_virtual_time(with_estimator)


async def leave(decode: DecodeStartEstimator, *calls: WaitingCall) -> None:
    """Let the calls get their first tokens, one each second."""
    for call in calls:
        await asyncio.sleep(1.0)
        decode.leave(call, answered=True)
        decode.leave(call, answered=True)  # this has no effect


def test_the_wait_for_a_slot_is_that_of_the_replica_with_the_shortest() -> None:
    async def main(replicas: Replicas, decode: DecodeStartEstimator) -> None:
        assert decode.estimate_wait_s() == 0.0  # no departure yet
        await leave(decode, *[decode.enter("a") for _ in range(10)][:4])
        await leave(decode, *[decode.enter("b") for _ in range(5)][:4])
        # At `b` one call waits, and four calls have left within 3 s. At `a` six calls wait.
        assert decode.estimate_wait_s() == pytest.approx(2 * 3 / 4)
        replicas.calls["a"] = 2  # a slot is free
        assert decode.estimate_wait_s() == 0.0

    run(main, a=12, b=12)


def test_calls_of_other_ingresses_fill_a_replica_too() -> None:
    async def main(replicas: Replicas, decode: DecodeStartEstimator) -> None:
        call = decode.enter("a")
        due_s = call.expected_start_at_s
        await asyncio.sleep(5.0)
        assert decode.postpone_if_full(call) == due_s
        replicas.reports["a"] = QueueReport(calls=3)
        assert decode.postpone_if_full(call) == due_s + 5.0  # it has not started yet

    run(main, a=1)


def test_a_full_replica_without_any_token_has_started() -> None:
    async def main(replicas: Replicas, decode: DecodeStartEstimator) -> None:
        calls = [decode.enter("a") for _ in range(3)]
        due_s = calls[-1].expected_start_at_s
        await asyncio.sleep(5.0)
        assert decode.postpone_if_full(calls[-1]) == due_s  # it makes no progress
        await leave(decode, calls[0])
        await asyncio.sleep(5.0)
        assert decode.postpone_if_full(calls[-1]) == due_s + 11.0  # the first call generates

    run(main, a=3)


def test_the_estimate_of_a_replica_that_has_gone_is_dropped() -> None:
    async def main(replicas: Replicas, decode: DecodeStartEstimator) -> None:
        calls = [decode.enter("a") for _ in range(7)]
        await leave(decode, *calls[:5])
        assert decode.estimate_wait_s() > 0.0
        del replicas.metadata["a"]
        decode.leave(calls[5], answered=False)
        replicas.metadata["a"] = {SLOTS: 2}
        assert decode.estimate_wait_s() == 0.0  # nothing is known of its successor

    run(main, a=12)
