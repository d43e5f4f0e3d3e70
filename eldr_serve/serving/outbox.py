"""Leases that were granted out of the decode queue, until their client fetches them by a long poll."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from eldr_serve.routing import Placement, State


class Outbox:
    """Of one router; a lease that ends before it was fetched is not handed out."""

    def __init__(self) -> None:
        self._granted: dict[str, list[Placement]] = {}  # by client
        self._polls: dict[str, asyncio.Event] = {}  # client -> set when its poll shall return
        self._closed = False

    def put(self, placements: Iterable[Placement]) -> None:
        for placement in placements:
            self._granted.setdefault(placement.client, []).append(placement)
            if placement.client in self._polls:
                self._polls[placement.client].set()

    def drop(self, client: str) -> None:
        """The client is gone."""
        self._granted.pop(client, None)

    def close(self) -> None:
        """Every poll returns now and in future: nothing will be put in here any more."""
        self._closed = True
        for event in self._polls.values():
            event.set()

    async def take(self, client: str, timeout_s: float) -> tuple[Placement, ...]:
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
        granted = self._granted.pop(client, []) if mine else []
        return tuple(placement.answer() for placement in granted if placement.state is State.LEASED)
