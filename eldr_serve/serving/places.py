"""The places for requests in one ingress replica; tenants wait for them in fair shares."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from eldr_serve.errors import Overloaded
from eldr_serve.routing.fairness import share
from eldr_serve.serving.tenants import Tenant
from eldr_serve.serving.wait_estimate import WaitEstimate


class Places:
    """So many requests at a time; named tenants may wait, and the smallest share of places is next.

    Args:
        most: places.
        most_waiting: requests that may wait; one more, and whoever has most that wait by its priority loses
            its newest.
        max_wait_s: how long one may wait, s; a request that would wait longer, by the rate at which places
            became free, is refused at once.

    Attributes:
        in_flight: places that are taken.
    """

    def __init__(self, most: int, most_waiting: int, max_wait_s: float) -> None:
        self.in_flight = 0
        self._most, self._most_waiting, self._max_wait_s = most, most_waiting, max_wait_s
        self._held: Counter[str] = Counter()
        self._waiting: dict[Tenant, deque[asyncio.Future[None]]] = {}
        self._waits = WaitEstimate()

    @property
    def waiting(self) -> int:
        """Requests without a place yet."""
        return sum(map(len, self._waiting.values()))

    @asynccontextmanager
    async def place(self, tenant: Tenant) -> AsyncIterator[None]:
        """One place for as long as the block runs; Overloaded (429) if there is none in time."""
        if self.in_flight < self._most:  # then nobody waits
            self._hold(tenant)
        elif tenant.name:
            await self._wait(tenant)
        else:
            raise self._overloaded(self.waiting + 1)
        try:
            yield
        finally:
            self._leave(tenant)

    def _ahead(self, tenant: Tenant) -> float:
        """Return how many places become free until a new request of the tenant gets one, itself included.

        Among tenants that all wait, each gets places in proportion to its priority.
        """
        priorities = sum(other.priority for other in {*self._waiting, tenant})
        own = len(self._waiting.get(tenant, ())) + 1
        return min(self.waiting + 1, own * priorities / tenant.priority)

    async def _wait(self, tenant: Tenant) -> None:
        ahead = self._ahead(tenant)
        if self._waits.wait_s(ahead) > self._max_wait_s:
            raise self._overloaded(ahead)
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant, deque()).append(granted)
        if self.waiting > self._most_waiting:
            self._turn_away()
        timer = asyncio.get_running_loop().call_later(self._max_wait_s, self._refuse, granted, ahead)
        try:
            await granted
        except BaseException:
            if granted.done() and not granted.cancelled() and granted.exception() is None:
                self._leave(tenant)  # a place was given while the client went
            raise
        finally:
            timer.cancel()
            self._forget(tenant, granted)

    def _hold(self, tenant: Tenant) -> None:
        self.in_flight += 1
        self._held[tenant.name] += 1

    def _leave(self, tenant: Tenant) -> None:
        full = self.in_flight == self._most
        self.in_flight -= 1
        self._held[tenant.name] -= 1
        if not self._held[tenant.name]:
            del self._held[tenant.name]
        while self._waiting and self.in_flight < self._most:
            following = min(self._waiting, key=lambda t: share(self._held[t.name], t.priority))
            granted = self._waiting[following].popleft()
            if not self._waiting[following]:
                del self._waiting[following]
            if not granted.done():
                self._hold(following)
                granted.set_result(None)
        if full or not self.in_flight:
            self._waits.departed(empty=not self.in_flight)

    def _forget(self, tenant: Tenant, granted: asyncio.Future[None]) -> None:
        queue = self._waiting.get(tenant)
        if queue is not None and granted in queue:
            queue.remove(granted)
            if not queue:
                del self._waiting[tenant]

    def _turn_away(self) -> None:
        crowd = max(self._waiting, key=lambda t: len(self._waiting[t]) / t.priority)
        self._refuse(self._waiting[crowd].pop(), self._ahead(crowd))
        if not self._waiting[crowd]:
            del self._waiting[crowd]

    def _overloaded(self, ahead: float) -> Overloaded:
        return Overloaded(
            f"{self.in_flight} requests are in flight here, the most allowed",
            status=429,
            retry_after_s=self._waits.retry_after_s(ahead),
        )

    def _refuse(self, granted: asyncio.Future[None], ahead: float) -> None:
        if not granted.done():
            granted.set_exception(self._overloaded(ahead))
