"""Requests of an ingress that wait for a change of a fleet's replicas."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial

_CHECK_S = 1.0  # some conditions change with time alone, for example at the end of an ejection


class Waiters:
    """Wakes waiting requests in order of arrival; a request that waits again keeps its turn."""

    def __init__(self) -> None:
        self._waiting: dict[object, asyncio.Future[None]] = {}  # waiting requests in order of arrival
        self._timer: asyncio.TimerHandle | None = None

    @contextmanager
    def take_turn(self) -> Iterator[Callable[[float], Awaitable[None]]]:
        """Yield a function that waits for the next change, at most until the given time of the event loop."""
        turn = object()
        try:
            yield partial(self._wait, turn)
        finally:
            self._waiting.pop(turn, None)

    async def _wait(self, turn: object, until_s: float) -> None:
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
