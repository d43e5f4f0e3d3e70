"""Concurrency limit of one ingress replica, with weighted fair queueing of tenants."""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from eldr_serve.errors import OverloadedError
from eldr_serve.limits.tenants import Tenant
from eldr_serve.queues.wait_estimate import WaitEstimator
from eldr_serve.scheduling.fairness import next_share


class ConcurrencyLimiter:
    """Limits concurrent requests; named tenants may wait, and the one with the smallest share is next.

    Args:
        max_requests: maximum number of concurrent requests.
        max_waiting: maximum number of waiting requests. Beyond it, the tenant with the most waiting requests
            per unit of priority loses its newest one.
        max_wait_s: maximum wait, s; a request is refused at once if the rate at which permits became free
            predicts a longer wait.
        clock: returns the time, s.

    Attributes:
        in_flight: number of admitted requests.
    """

    def __init__(
        self,
        max_requests: int,
        max_waiting: int,
        max_wait_s: float,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.in_flight = 0
        self._max_requests = max_requests
        self._max_waiting = max_waiting
        self._max_wait_s = max_wait_s
        self._permits: Counter[str] = Counter()
        self._waiting: dict[Tenant, deque[asyncio.Future[None]]] = {}
        self._waits = WaitEstimator(clock=clock)

    @property
    def num_waiting(self) -> int:
        """Return the number of waiting requests."""
        return sum(map(len, self._waiting.values()))

    @asynccontextmanager
    async def permit(self, tenant: Tenant) -> AsyncIterator[None]:
        """Hold a permit until the context ends; raise OverloadedError (429) if none is free in time."""
        if self.in_flight < self._max_requests:  # no request waits in this case
            self._acquire(tenant)
        elif tenant.name:
            await self._wait(tenant)
        else:
            raise self._overloaded(self.num_waiting + 1)
        try:
            yield
        finally:
            self._release(tenant)

    def _permits_ahead(self, tenant: Tenant) -> float:
        """Return how many permits become free until a new request of the tenant gets one, itself included.

        Among tenants that all wait, each gets permits in proportion to its priority.
        """
        priorities = sum(other.priority for other in {*self._waiting, tenant})
        own = len(self._waiting.get(tenant, ())) + 1
        return min(self.num_waiting + 1, own * priorities / tenant.priority)

    async def _wait(self, tenant: Tenant) -> None:
        ahead = self._permits_ahead(tenant)
        if self._waits.estimate_wait_s(ahead) > self._max_wait_s:
            raise self._overloaded(ahead)
        permit: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant, deque()).append(permit)
        if self.num_waiting > self._max_waiting:
            self._drop_newest()
        timer = asyncio.get_running_loop().call_later(self._max_wait_s, self._refuse, permit, ahead)
        try:
            await permit
        except BaseException:
            if permit.done() and not permit.cancelled() and permit.exception() is None:
                self._release(tenant)  # the permit was granted while the client disconnected
            raise
        finally:
            timer.cancel()
            self._remove(tenant, permit)

    def _acquire(self, tenant: Tenant) -> None:
        self.in_flight += 1
        self._permits[tenant.name] += 1

    def _release(self, tenant: Tenant) -> None:
        full = self.in_flight == self._max_requests
        self.in_flight -= 1
        self._permits[tenant.name] -= 1
        if not self._permits[tenant.name]:
            del self._permits[tenant.name]
        while self._waiting and self.in_flight < self._max_requests:
            next_tenant = min(self._waiting, key=lambda t: next_share(self._permits[t.name], t.priority))
            permit = self._waiting[next_tenant].popleft()
            if not self._waiting[next_tenant]:
                del self._waiting[next_tenant]
            if not permit.done():
                self._acquire(next_tenant)
                permit.set_result(None)
        if full or not self.in_flight:
            self._waits.record_departure(empty=not self.in_flight)

    def _remove(self, tenant: Tenant, permit: asyncio.Future[None]) -> None:
        queue = self._waiting.get(tenant)
        if queue is not None and permit in queue:
            queue.remove(permit)
            if not queue:
                del self._waiting[tenant]

    def _drop_newest(self) -> None:
        largest_tenant = max(self._waiting, key=lambda t: len(self._waiting[t]) / t.priority)
        self._refuse(self._waiting[largest_tenant].pop(), self._permits_ahead(largest_tenant))
        if not self._waiting[largest_tenant]:
            del self._waiting[largest_tenant]

    def _overloaded(self, ahead: float) -> OverloadedError:
        return OverloadedError(
            f"the ingress is at its limit of {self._max_requests} concurrent requests",
            status=429,
            retry_after_s=self._waits.retry_after_s(ahead),
        )

    def _refuse(self, permit: asyncio.Future[None], ahead: float) -> None:
        if not permit.done():
            permit.set_exception(self._overloaded(ahead))
