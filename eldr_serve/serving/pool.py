"""Prefilled requests that wait for a decode worker, and the leases on their way to those who asked."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, replace

from eldr_serve.routing import PlacementRequest
from eldr_serve.serving.messages import Lease


@dataclass(frozen=True)
class Waiting:
    """One request of the pool."""

    client: str
    request: PlacementRequest
    handoff: PlacementRequest
    since_s: float  # by the clock of the pool's owner


class Pool:
    """Waiting requests in order of arrival, whichever client they came from."""

    def __init__(self) -> None:
        self._waiting: dict[str, Waiting] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._waiting

    def get(self, request_id: str) -> Waiting | None:
        """The request, if it waits."""
        return self._waiting.get(request_id)

    @property
    def waiting(self) -> list[Waiting]:
        """All of them, first come first."""
        return list(self._waiting.values())

    @property
    def since_s(self) -> float | None:
        """When the one that has waited longest came; None in an empty pool."""
        return min((w.since_s for w in self._waiting.values()), default=None)

    def add(self, waiting: Waiting) -> None:
        """A request that waits already keeps its turn, and takes the newer contents."""
        before = self._waiting.get(waiting.request.request_id)
        if before is not None:
            waiting = replace(waiting, since_s=before.since_s)
        self._waiting[waiting.request.request_id] = waiting

    def discard(self, request_id: str) -> bool:
        """The request waits no longer; False if it did not."""
        return self._waiting.pop(request_id, None) is not None

    def drop_clients(self, clients: Iterable[str]) -> int:
        """Forget the requests of clients that are gone; returns how many."""
        gone = set(clients)
        lost = [request_id for request_id, w in self._waiting.items() if w.client in gone]
        for request_id in lost:
            del self._waiting[request_id]
        return len(lost)

    def forget_scores(self) -> None:
        """The table is another one: similarities to the old one's centroids mean nothing now."""
        for request_id, waiting in self._waiting.items():
            if waiting.handoff.similarity is not None:
                self._waiting[request_id] = replace(
                    waiting, handoff=replace(waiting.handoff, similarity=None)
                )


class Outbox:
    """Leases that were granted out of the pool, until their client fetches them by a long poll."""

    def __init__(self) -> None:
        self._granted: dict[str, dict[str, Lease]] = {}  # client -> request id -> lease
        self._polls: dict[str, asyncio.Event] = {}  # client -> set when its poll shall return
        self._closed = False

    def put(self, client: str, lease: Lease) -> None:
        self._granted.setdefault(client, {})[lease.request_id] = lease
        if client in self._polls:
            self._polls[client].set()

    def withdraw(self, client: str, request_id: str) -> None:
        """The lease has ended before it was fetched; does nothing if there is none."""
        self._granted.get(client, {}).pop(request_id, None)

    def drop(self, client: str) -> None:
        """The client is gone."""
        self._granted.pop(client, None)

    def close(self) -> None:
        """Every poll returns now and in future: nothing will be put in here any more."""
        self._closed = True
        for event in self._polls.values():
            event.set()

    async def take(self, client: str, timeout_s: float) -> tuple[Lease, ...]:
        """The client's leases, as soon as there are any; empty after `timeout_s` seconds.

        A client's newest poll is the one that counts: an older one, whose caller may have gone, returns
        empty at once and takes nothing.
        """
        if client in self._polls:
            self._polls[client].set()
        poll = self._polls[client] = asyncio.Event()
        try:
            if not self._granted.get(client) and not self._closed:
                async with asyncio.timeout(timeout_s):
                    await poll.wait()
        except TimeoutError:
            pass
        finally:
            mine = self._polls.get(client) is poll
            if mine:
                del self._polls[client]
        return tuple(self._granted.pop(client, {}).values()) if mine else ()
