"""Places in an ingress replica: none is lost, none stands empty, and tenants share them by their priority."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eldr_serve.errors import Overloaded
from eldr_serve.limits.concurrency import ConcurrencyLimiter
from eldr_serve.limits.keys import Limits
from eldr_serve.limits.tenants import Tenant

PRIORITIES = {"a": 1.0, "b": 2.0, "c": 0.5}
MOST, MOST_WAITING = 3, 6

steps = st.lists(
    st.tuples(st.sampled_from(["come", "end", "leave"]), st.sampled_from("abc"), st.integers(0, 9)),
    max_size=40,
)


class Crowd:
    """Requests that hold a place until they are told to end."""

    def __init__(self) -> None:
        self.limiter = ConcurrencyLimiter(MOST, MOST_WAITING, max_wait_s=100.0)
        self.tenants = {name: Tenant(name, Limits(priority=p)) for name, p in PRIORITIES.items()}
        self.running: list[tuple[str, asyncio.Event, asyncio.Task[None]]] = []
        self.waiting: list[tuple[str, asyncio.Task[None]]] = []
        self.turned_away = 0

    async def _one(self, tenant: str) -> None:
        me = asyncio.current_task()
        assert me is not None
        async with self.limiter.permit(self.tenants[tenant]):
            end = asyncio.Event()
            self.running.append((tenant, end, me))
            await end.wait()

    async def come(self, tenant: str) -> None:
        task = asyncio.create_task(self._one(tenant))
        self.waiting.append((tenant, task))
        await self.settle()

    async def settle(self) -> None:
        for _ in range(5):
            await asyncio.sleep(0)
        inside = {task for _, _, task in self.running}
        for entry in [entry for entry in self.waiting if entry[1].done()]:
            self.waiting.remove(entry)
            self.turned_away += isinstance(entry[1].exception(), Overloaded)
        self.waiting = [entry for entry in self.waiting if entry[1] not in inside]

    async def end(self, number: int, *, leave: bool = False) -> None:
        _, end, task = self.running.pop(number % len(self.running))
        _ = task.cancel() if leave else end.set()
        await asyncio.wait([task])
        await self.settle()


@settings(deadline=None)
@given(steps)
def test_places_are_never_lost_and_go_to_the_smallest_share(steps: list[tuple[str, str, int]]) -> None:
    async def run() -> None:
        crowd = Crowd()
        for what, tenant, number in steps:
            queued, running = list(crowd.waiting), Counter(name for name, *_ in crowd.running)
            if what == "come":
                await crowd.come(tenant)
            elif what == "leave" and crowd.waiting:
                _, task = crowd.waiting.pop(number % len(crowd.waiting))
                task.cancel()
                await asyncio.wait([task])
                await crowd.settle()
            elif crowd.running:
                gone = crowd.running[number % len(crowd.running)][0]
                await crowd.end(number, leave=what == "leave")
                if queued:
                    running[gone] -= 1
                    (served,) = Counter(name for name, *_ in crowd.running) - running
                    share = {name: (running[name] + 1) / PRIORITIES[name] for name, _ in queued}
                    assert share[served] == min(share.values())
            assert crowd.limiter.in_flight == len(crowd.running) <= MOST
            assert crowd.limiter.waiting == len(crowd.waiting) <= MOST_WAITING
            assert not crowd.waiting or len(crowd.running) == MOST  # no place stands empty
        while crowd.running:
            await crowd.end(0)
        assert not crowd.waiting
        assert (crowd.limiter.in_flight, crowd.limiter.waiting) == (0, 0)

    asyncio.run(run())


async def test_who_crowds_the_waiting_room_is_turned_away_first() -> None:
    crowd = Crowd()
    for _ in range(MOST + MOST_WAITING):
        await crowd.come("a")
    await crowd.come("b")
    assert crowd.turned_away == 1
    assert [name for name, _ in crowd.waiting] == ["a"] * (MOST_WAITING - 1) + ["b"]
    await crowd.end(0)
    assert crowd.running[-1][0] == "b"
    while crowd.running:
        await crowd.end(0)


async def test_the_nameless_do_not_wait_and_tenants_not_for_ever() -> None:
    limiter = ConcurrencyLimiter(1, 9, max_wait_s=0.01)
    async with limiter.permit(Tenant()):
        for tenant in (Tenant(), Tenant("a")):
            with pytest.raises(Overloaded) as refused:
                async with limiter.permit(tenant):
                    raise AssertionError("there is no place")
            assert refused.value.status == 429
        assert limiter.in_flight == 1
    assert (limiter.in_flight, limiter.waiting) == (0, 0)


async def test_a_place_that_was_given_to_one_who_just_went_is_free_again() -> None:
    limiter = ConcurrencyLimiter(1, 9, max_wait_s=10.0)

    async def waits() -> None:
        async with limiter.permit(Tenant("a")):
            raise AssertionError("it was cancelled")

    async with limiter.permit(Tenant("a")):
        task = asyncio.create_task(waits())
        await asyncio.sleep(0)
    assert limiter.in_flight == 1  # it has the place, and does not know
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert limiter.in_flight == 0
