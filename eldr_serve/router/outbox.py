"""Leases granted from the decode queue, kept until their client fetches them by a long poll."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from eldr_serve.scheduling import Placement, State


class Outbox:
    """Unfetched leases of one router; leases that have ended are not handed out."""

    def __init__(self) -> None:
        self._granted: dict[str, list[Placement]] = {}  # by client
        self._polls: dict[str, asyncio.Event] = {}  # client -> event that ends its poll
        self._closed = False

    def put(self, placements: Iterable[Placement]) -> None:
        """Add leases and end their clients' polls."""
        for placement in placements:
            self._granted.setdefault(placement.client, []).append(placement)
            if placement.client in self._polls:
                self._polls[placement.client].set()

    def drop(self, client: str) -> None:
        """Discard the leases of a client that is gone."""
        self._granted.pop(client, None)

    def close(self) -> None:
        """End all polls, current and future; no lease will be added any more."""
        self._closed = True
        for event in self._polls.values():
            event.set()

    async def take(self, client: str, timeout_s: float) -> tuple[Placement, ...]:
        """Return the client's leases as soon as there are any, or nothing after `timeout_s` seconds.

        A new poll ends the client's older one, whose caller may be gone, with an empty result.
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
        granted = self._granted.pop(client, []) if mine else []
        return tuple(placement.answer() for placement in granted if placement.state is State.LEASED)
