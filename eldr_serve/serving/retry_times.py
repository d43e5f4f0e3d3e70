"""Retry times for refused requests: a virtual queue, so that clients come back one after the other."""

from __future__ import annotations

import random
from bisect import bisect_right, insort
from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter

MOST_S = 600.0  # the longest time that a client is told
_EARLY_S = 1.5  # before its time, a client that comes again is still taken for the one that was refused
_GRACE_S = 5.0  # after its time a reservation is forgotten
_MOST = 10_000  # reservations; beyond these the next client is told the time of the last one


@dataclass(frozen=True)
class _Reservation:
    due_s: float
    tokens: float
    key: int


class RetryTimes:
    """Reservations for the refused requests of one process.

    Args:
        clock: returns the time, s.
    """

    def __init__(self, *, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._queue: list[_Reservation] = []  # by due_s
        self._tokens = 0.0

    @property
    def tokens(self) -> float:
        """Tokens of all reservations."""
        self._forget()
        return self._tokens

    @property
    def due_tokens(self) -> float:
        """Tokens of those that may come now; others do not get the room that these were promised."""
        self._forget()
        return sum(found.tokens for found in self._queue[: self._due()])

    def reserve(self, key: int, tokens: float, after_s: float, most_s: float = MOST_S) -> float:
        """Promise room for `tokens` after so many seconds, and return the seconds to tell the client.

        Args:
            key: names the request, to know it again.
            most_s: beyond it nothing is promised, and the time that is told is drawn from its second half, s.
        """
        self._forget()
        now = self._clock()
        if after_s >= most_s:
            return random.uniform(most_s / 2, most_s)
        if len(self._queue) >= _MOST:
            return max(after_s, self._queue[-1].due_s - now)
        insort(self._queue, _Reservation(now + after_s, tokens, key), key=attrgetter("due_s"))
        self._tokens += tokens
        return after_s

    def is_due(self, key: int) -> bool:
        """Return whether this is a refused request that comes again at its time."""
        self._forget()
        return any(found.key == key for found in self._queue[: self._due()])

    def claim(self, key: int) -> None:
        """Remove the reservation of a request that has been taken, if it is due."""
        for index, found in enumerate(self._queue[: self._due()]):
            if found.key == key:
                self._tokens -= found.tokens
                del self._queue[index]
                return

    def _due(self) -> int:
        return bisect_right(self._queue, self._clock() + _EARLY_S, key=attrgetter("due_s"))

    def _forget(self) -> None:
        expired = bisect_right(self._queue, self._clock() - _GRACE_S, key=attrgetter("due_s"))
        self._tokens -= sum(found.tokens for found in self._queue[:expired])
        del self._queue[:expired]
        if not self._queue:
            self._tokens = 0.0
