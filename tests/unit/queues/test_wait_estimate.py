"""Waits are predicted from the rate of departures, and requests that would wait too long are refused."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from eldr_serve.errors import Overloaded
from eldr_serve.limits.concurrency import ConcurrencyLimiter
from eldr_serve.limits.keys import Limits
from eldr_serve.limits.tenants import Tenant
from eldr_serve.queues.wait_estimate import WaitEstimate
from eldr_serve.replicas.decode_turns import SLOTS, DecodeTurns


def test_the_predicted_wait_is_the_mean_interval_times_the_number_ahead() -> None:
    now = 0.0
    estimate = WaitEstimate(clock=lambda: now)
    for _ in range(3):
        now += 2.0
        estimate.departed(empty=False)
    assert estimate.wait_s(5) == 0.0  # too few departures
    assert estimate.retry_after_s(5) == 1
    now += 2.0
    estimate.departed(empty=False)
    assert estimate.wait_s(5) == pytest.approx(5 * 6.0 / 4)
    assert estimate.retry_after_s(5) == 8
    now += 100.0  # a queue that does not move waits longer
    assert estimate.wait_s(5) > 100.0
    estimate.departed(empty=True)
    assert estimate.wait_s(5) == 0.0


async def test_a_tenant_that_would_wait_too_long_is_refused_at_once() -> None:
    now = 0.0
    limiter = ConcurrencyLimiter(1, 100, max_wait_s=3.0)
    limiter._waits = WaitEstimate(clock=lambda: now)
    ends: list[asyncio.Event] = []

    async def hold(tenant: Tenant) -> None:
        async with limiter.permit(tenant):
            ends.append(asyncio.Event())
            await ends[-1].wait()

    large, small = Tenant("large"), Tenant("small", Limits(priority=2.0))
    tasks = [asyncio.create_task(hold(large)) for _ in range(10)]
    for number in range(4):  # a permit becomes free each second
        await asyncio.sleep(0.01)
        now += 1.0
        ends[number].set()
    await asyncio.sleep(0.01)
    assert (limiter.in_flight, limiter.waiting) == (1, 5)
    with pytest.raises(Overloaded) as refused:
        await hold(large)
    assert (refused.value.status, refused.value.retry_after_s) == (429, 5)  # 6 permits, 0.75 s each
    tasks.append(asyncio.create_task(hold(small)))  # it does not wait behind the other tenant
    await asyncio.sleep(0.01)
    assert limiter.waiting == 6
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert (limiter.in_flight, limiter.waiting) == (0, 0)


async def test_the_wait_for_a_slot_is_that_of_the_replica_with_the_shortest() -> None:
    directory = SimpleNamespace(metadata={"a": {SLOTS: 2}, "b": {SLOTS: 2}}, reports={})
    fleet: Any = SimpleNamespace(directory=directory, in_flight={"a": 12, "b": 12}, live=["a", "b"])
    decode = DecodeTurns(fleet)
    assert decode.wait_s() == 0.0  # no departure yet
    for name, calls in (("a", 10), ("b", 5)):
        turns = [decode.enter(name) for _ in range(calls)]
        for turn in turns[:4]:
            await asyncio.sleep(0.02)
            decode.leave(turn, answered=True)
            decode.leave(turn, answered=True)  # has no effect
    assert 0.01 < decode.wait_s() < 0.2  # one call waits at b, six at a
    fleet.in_flight["a"] = 2  # a slot is free
    assert decode.wait_s() == 0.0


async def test_the_estimate_of_a_replica_that_has_gone_is_dropped() -> None:
    directory = SimpleNamespace(metadata={"a": {SLOTS: 2}, "b": {SLOTS: 2}}, reports={})
    fleet: Any = SimpleNamespace(directory=directory, in_flight={"a": 12, "b": 12}, live=["a", "b"])
    decode = DecodeTurns(fleet)
    turns = [decode.enter("a") for _ in range(3)]
    decode.leave(turns[0], answered=True)
    assert decode._waits.keys() == {"a"}
    del directory.metadata["a"]
    fleet.live.remove("a")
    decode.wait_s()
    decode.leave(turns[1], answered=False)
    assert not decode._waits
