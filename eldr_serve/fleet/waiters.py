"""Requests of an ingress that wait for a change of a fleet's replicas."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager, suppress

_CHECK_S = 1.0  # some conditions change with time alone, for example at the end of an ejection


class Turn:
    """The turn of one request, which it keeps when it waits again."""

    def __init__(self, waiters: Waiters) -> None:
        self._waiters = waiters

    async def wait_until(self, until_s: float) -> None:
        """Wait for the next change, at most until this time of the event loop."""
        await self._waiters.wait(self, until_s)


class Waiters:
    """Wakes waiting requests in order of their turns."""

    def __init__(self) -> None:
        self._waiting: dict[Turn, asyncio.Future[None]] = {}  # in order of arrival
        self._timer: asyncio.TimerHandle | None = None

    @contextmanager
    def take_turn(self) -> Iterator[Turn]:
        """Yield a turn, in which a request may wait repeatedly; the turn ends with the block."""
        turn = Turn(self)
        try:
            yield turn
        finally:
            self._waiting.pop(turn, None)

    async def wait(self, turn: Turn, until_s: float) -> None:
        """Wait in this turn for the next change, at most until this time of the event loop."""
        loop = asyncio.get_running_loop()
        changed = self._waiting[turn] = loop.create_future()
        if self._timer is None:
            self._timer = loop.call_later(_CHECK_S, self.wake)
        with suppress(TimeoutError):
            async with asyncio.timeout_at(until_s):
                await changed

    def wake(self) -> None:
        """Wake all waiting requests, which then check their conditions; call this in the event loop."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for changed in self._waiting.values():
            if not changed.done():
                changed.set_result(None)
