"""Retry times for refused requests: a virtual queue, so that clients return one after the other."""

from __future__ import annotations

import random
from bisect import bisect_right, insort
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from operator import attrgetter

MAX_RETRY_AFTER_S = 600.0  # maximum Retry-After
_EARLY_S = 1.5  # a retry may come this much early
_GRACE_S = 5.0  # a reservation expires this long after its time
_MAX_RESERVATIONS = 10_000  # maximum number of reservations; further clients get the time of the last one


@dataclass(frozen=True)
class _Reservation:
    due_at_s: float
    amount: float
    key: Hashable


class RetryTimes:
    """Reservations for the refused requests of one process.

    Args:
        clock: returns the time, s.
    """

    def __init__(self, *, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._queue: list[_Reservation] = []  # reservations, sorted by due_at_s
        self._amount = 0.0

    @property
    def amount(self) -> float:
        """Return the amount of all reservations: tokens or requests, as the caller counts."""
        self._expire()
        return self._amount

    @property
    def due_amount(self) -> float:
        """Return the amount of the reservations that are due, whose room is not given to other requests."""
        self._expire()
        return sum(reservation.amount for reservation in self._queue[: self._count_due()])

    def reserve(
        self, key: Hashable, amount: float, after_s: float, max_s: float = MAX_RETRY_AFTER_S
    ) -> float:
        """Reserve room for `amount` after `after_s`; return the Retry-After for the client, s.

        Args:
            key: identifies the request when it is sent again; its earlier reservation is replaced.
            amount: estimated amount that the request needs: tokens or requests, as the caller counts.
            after_s: estimated time until there is room, s.
            max_s: maximum Retry-After, s. If `after_s` is not below it, nothing is reserved and the result
                is drawn at random from the upper half of the range up to `max_s`.
        """
        self._expire()
        now_s = self._clock()
        self._remove(key, len(self._queue))
        if after_s >= max_s:
            return random.uniform(max_s / 2, max_s)
        if len(self._queue) >= _MAX_RESERVATIONS:
            return min(max_s, max(after_s, self._queue[-1].due_at_s - now_s))
        insort(self._queue, _Reservation(now_s + after_s, amount, key), key=attrgetter("due_at_s"))
        self._amount += amount
        return after_s

    def is_due(self, key: Hashable) -> bool:
        """Return whether this is a refused request that retries at its reserved time."""
        self._expire()
        return any(reservation.key == key for reservation in self._queue[: self._count_due()])

    def claim(self, key: Hashable) -> None:
        """Remove the reservation of an accepted request, if it is due."""
        self._remove(key, self._count_due())

    def _remove(self, key: Hashable, among: int) -> None:
        """Remove the reservation of a key from the first `among`, if it is there."""
        for index, reservation in enumerate(self._queue[:among]):
            if reservation.key == key:
                self._amount -= reservation.amount
                del self._queue[index]
                return

    def _count_due(self) -> int:
        return bisect_right(self._queue, self._clock() + _EARLY_S, key=attrgetter("due_at_s"))

    def _expire(self) -> None:
        expired = bisect_right(self._queue, self._clock() - _GRACE_S, key=attrgetter("due_at_s"))
        self._amount -= sum(reservation.amount for reservation in self._queue[:expired])
        del self._queue[:expired]
        if not self._queue:
            self._amount = 0.0
