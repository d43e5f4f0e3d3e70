"""Waits are predicted from how fast a line has moved, and who would wait too long is refused at once."""

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


def test_a_prediction_is_the_mean_interval_times_those_ahead() -> None:
    now = 0.0
    line = WaitEstimate(clock=lambda: now)
    for _ in range(3):
        now += 2.0
        line.departed(empty=False)
    assert line.wait_s(5) == 0.0  # too little is known
    assert line.retry_after_s(5) == 1
    now += 2.0
    line.departed(empty=False)
    assert line.wait_s(5) == pytest.approx(5 * 6.0 / 4)
    assert line.retry_after_s(5) == 8
    now += 100.0  # a line that stands still is a longer wait
    assert line.wait_s(5) > 100.0
    line.departed(empty=True)
    assert line.wait_s(5) == 0.0


async def test_a_tenant_that_would_wait_too_long_for_a_place_is_refused_at_once() -> None:
    now = 0.0
    limiter = ConcurrencyLimiter(1, 100, max_wait_s=3.0)
    limiter._waits = WaitEstimate(clock=lambda: now)
    ends: list[asyncio.Event] = []

    async def holds(tenant: Tenant) -> None:
        async with limiter.permit(tenant):
            ends.append(asyncio.Event())
            await ends[-1].wait()

    crowd, modest = Tenant("crowd"), Tenant("modest", Limits(priority=2.0))
    tasks = [asyncio.create_task(holds(crowd)) for _ in range(10)]
    for number in range(4):  # a place becomes free each second
        await asyncio.sleep(0.01)
        now += 1.0
        ends[number].set()
    await asyncio.sleep(0.01)
    assert (limiter.in_flight, limiter.waiting) == (1, 5)
    with pytest.raises(Overloaded) as refused:
        await holds(crowd)
    assert (refused.value.status, refused.value.retry_after_s) == (429, 5)  # 6 places, 0.75 s each
    tasks.append(asyncio.create_task(holds(modest)))  # the other tenant's line is not its own
    await asyncio.sleep(0.01)
    assert limiter.waiting == 6
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert (limiter.in_flight, limiter.waiting) == (0, 0)


class World:
    """Decode replicas with calls as an ingress sees them."""

    def __init__(self, **slots: int) -> None:
        metadata = {name: {SLOTS: number} for name, number in slots.items()}
        directory = SimpleNamespace(metadata=metadata, reports={})
        self.fleet: Any = SimpleNamespace(directory=directory, in_flight={}, live=list(slots))
        self.turns = DecodeTurns(self.fleet)


async def test_the_wait_for_a_seat_is_that_of_the_replica_that_has_one_first() -> None:
    world = World(a=2, b=2)
    world.fleet.in_flight |= {"a": 12, "b": 12}
    assert world.turns.wait_s() == 0.0  # nobody has waited yet
    for name, calls in (("a", 10), ("b", 5)):
        turns = [world.turns.enter(name) for _ in range(calls)]
        for turn in turns[:4]:
            await asyncio.sleep(0.02)
            world.turns.leave(turn, answered=True)
            world.turns.leave(turn, answered=True)  # has no effect
    assert 0.01 < world.turns.wait_s() < 0.2  # b: one waits; a: six
    world.fleet.in_flight["a"] = 2  # a slot is free
    assert world.turns.wait_s() == 0.0


async def test_the_estimate_of_a_replica_that_has_gone_is_dropped() -> None:
    world = World(a=2, b=2)
    world.fleet.in_flight |= {"a": 12, "b": 12}
    turns = [world.turns.enter("a") for _ in range(3)]
    world.turns.leave(turns[0], answered=True)
    assert world.turns._waits.keys() == {"a"}
    del world.fleet.directory.metadata["a"]
    world.fleet.live.remove("a")
    world.turns.wait_s()
    world.turns.leave(turns[1], answered=False)
    assert not world.turns._waits
