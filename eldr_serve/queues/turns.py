"""Estimate when a replica starts to work on a call, so that time limits exclude the wait before it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(eq=False)
class Turn:
    """One call in the queue of a replica.

    Attributes:
        since_s: time from which the replica is expected to work on this call, on the queue's clock.
    """

    replica: str
    number: int
    since_s: float


class Turns:
    """The calls of this process that replicas have not answered yet; replicas serve in order of arrival.

    A call's turn starts after its predicted wait. Each answer to an earlier call shows that the replica makes
    progress, and postpones the turns of later calls to that moment at least.
    """

    def __init__(self, *, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._number = 0
        self._waiting: dict[str, dict[int, Turn]] = {}

    def enter(self, replica: str, expected_s: float = 0.0) -> Turn:
        """Add a call that the replica is expected to start after `expected_s` seconds."""
        self._number += 1
        turn = Turn(replica, self._number, self._clock() + expected_s)
        self._waiting.setdefault(replica, {})[turn.number] = turn
        return turn

    def waiting(self, replica: str) -> int:
        """Return the number of unanswered calls to a replica."""
        return len(self._waiting.get(replica, {}))

    def leave(self, turn: Turn, *, answered: bool) -> None:
        """Remove a call; `answered` tells whether the replica worked on it. Further calls have no effect."""
        waiting = self._waiting.get(turn.replica, {})
        if waiting.pop(turn.number, None) is None:
            return
        if not waiting:
            del self._waiting[turn.replica]
        if answered:
            now = self._clock()
            for later in reversed(waiting.values()):
                if later.number < turn.number:
                    break
                later.since_s = max(later.since_s, now)
