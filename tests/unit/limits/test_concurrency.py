"""The concurrency limiter: no permit is lost or left unused, and tenants share permits by priority."""

import asyncio
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eldr_serve.errors import OverloadedError
from eldr_serve.limits.concurrency import ConcurrencyLimiter
from eldr_serve.limits.keys import Limits
from eldr_serve.limits.tenants import Tenant
from tests.support.clock import Clock

PRIORITIES = {"a": 1.0, "b": 2.0, "c": 0.5}
MAX_IN_FLIGHT, MAX_WAITING = 3, 6

steps = st.lists(
    st.tuples(st.sampled_from(["arrive", "end", "cancel"]), st.sampled_from("abc"), st.integers(0, 9)),
    max_size=40,
)


class Requests:
    """Requests that hold a permit until the test ends them."""

    def __init__(self) -> None:
        self.limiter = ConcurrencyLimiter(MAX_IN_FLIGHT, MAX_WAITING, max_wait_s=100.0)
        self.tenants = {name: Tenant(name, Limits(priority=p)) for name, p in PRIORITIES.items()}
        self.running: list[tuple[str, asyncio.Event, asyncio.Task[None]]] = []
        self.waiting: list[tuple[str, asyncio.Task[None]]] = []
        self.refused = 0

    async def _one(self, tenant: str) -> None:
        task = asyncio.current_task()
        assert task is not None
        async with self.limiter.permit(self.tenants[tenant]):
            end = asyncio.Event()
            self.running.append((tenant, end, task))
            await end.wait()

    async def arrive(self, tenant: str) -> None:
        task = asyncio.create_task(self._one(tenant))
        self.waiting.append((tenant, task))
        await self.settle()

    async def settle(self) -> None:
        for _ in range(5):
            await asyncio.sleep(0)
        running = {task for _, _, task in self.running}
        for entry in [entry for entry in self.waiting if entry[1].done()]:
            self.waiting.remove(entry)
            self.refused += isinstance(entry[1].exception(), OverloadedError)
        self.waiting = [entry for entry in self.waiting if entry[1] not in running]

    async def end(self, number: int, *, cancel: bool = False) -> None:
        _, end, task = self.running.pop(number % len(self.running))
        _ = task.cancel() if cancel else end.set()
        await asyncio.wait([task])
        await self.settle()


@given(steps)
def test_permits_are_never_lost_and_go_to_the_smallest_share(steps: list[tuple[str, str, int]]) -> None:
    async def run() -> None:
        requests = Requests()
        for what, tenant, number in steps:
            queued, running = list(requests.waiting), Counter(name for name, *_ in requests.running)
            if what == "arrive":
                await requests.arrive(tenant)
            elif what == "cancel" and requests.waiting:
                _, task = requests.waiting.pop(number % len(requests.waiting))
                task.cancel()
                await asyncio.wait([task])
                await requests.settle()
            elif requests.running:
                ended = requests.running[number % len(requests.running)][0]
                await requests.end(number, cancel=what == "cancel")
                if queued:
                    running[ended] -= 1
                    (served,) = Counter(name for name, *_ in requests.running) - running
                    share = {name: (running[name] + 1) / PRIORITIES[name] for name, _ in queued}
                    assert share[served] == min(share.values())
            assert requests.limiter.in_flight == len(requests.running) <= MAX_IN_FLIGHT
            assert requests.limiter.num_waiting == len(requests.waiting) <= MAX_WAITING
            assert not requests.waiting or len(requests.running) == MAX_IN_FLIGHT  # no permit is unused
        while requests.running:
            await requests.end(0)
        assert not requests.waiting
        assert (requests.limiter.in_flight, requests.limiter.num_waiting) == (0, 0)

    asyncio.run(run())


async def test_the_tenant_with_most_waiting_requests_is_refused_first() -> None:
    requests = Requests()
    for _ in range(MAX_IN_FLIGHT + MAX_WAITING):
        await requests.arrive("a")
    await requests.arrive("b")
    assert requests.refused == 1
    assert [name for name, _ in requests.waiting] == ["a"] * (MAX_WAITING - 1) + ["b"]
    await requests.end(0)
    assert requests.running[-1][0] == "b"
    while requests.running:
        await requests.end(0)


async def test_requests_without_a_tenant_do_not_wait_and_tenants_wait_a_limited_time() -> None:
    limiter = ConcurrencyLimiter(1, 9, max_wait_s=0.01)
    async with limiter.permit(Tenant()):
        for tenant in (Tenant(), Tenant("a")):
            with pytest.raises(OverloadedError) as refused:
                async with limiter.permit(tenant):
                    raise AssertionError("no permit is free")
            assert refused.value.status == 429
        assert limiter.in_flight == 1
    assert (limiter.in_flight, limiter.num_waiting) == (0, 0)


async def test_a_tenant_that_would_wait_too_long_is_refused_at_once() -> None:
    clock = Clock()
    limiter = ConcurrencyLimiter(1, 100, max_wait_s=3.0, clock=clock)
    ends: list[asyncio.Event] = []

    async def hold(tenant: Tenant) -> None:
        async with limiter.permit(tenant):
            ends.append(asyncio.Event())
            await ends[-1].wait()

    async def settle() -> None:
        for _ in range(5):
            await asyncio.sleep(0)

    large, small = Tenant("large"), Tenant("small", Limits(priority=2.0))
    tasks = [asyncio.create_task(hold(large)) for _ in range(10)]
    for number in range(4):  # a permit becomes free each second
        await settle()
        clock.now += 1.0
        ends[number].set()
    await settle()
    assert (limiter.in_flight, limiter.num_waiting) == (1, 5)
    with pytest.raises(OverloadedError) as refused:
        await hold(large)
    assert (refused.value.status, refused.value.retry_after_s) == (429, 5)  # 6 permits, 0.75 s each
    tasks.append(asyncio.create_task(hold(small)))  # it does not wait behind the other tenant
    await settle()
    assert limiter.num_waiting == 6
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert (limiter.in_flight, limiter.num_waiting) == (0, 0)


async def test_a_permit_given_to_a_request_that_was_just_cancelled_is_free_again() -> None:
    limiter = ConcurrencyLimiter(1, 9, max_wait_s=10.0)

    async def waits() -> None:
        async with limiter.permit(Tenant("a")):
            raise AssertionError("it was cancelled")

    async with limiter.permit(Tenant("a")):
        task = asyncio.create_task(waits())
        await asyncio.sleep(0)
    assert limiter.in_flight == 1  # the task has the permit, but has not run yet
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert limiter.in_flight == 0
