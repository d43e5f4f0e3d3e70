"""Since when a replica can be expected to work for a call: time limits do not count the wait before it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(eq=False)
class Turn:
    """One call in the queue of a replica.

    Attributes:
        since_s: from when the replica can be expected to work for the call alone, on the queue's clock.
    """

    replica: str
    number: int
    since_s: float


class Turns:
    """The calls of this process that replicas have not answered yet; each replica serves first come first.

    A call's turn has come when the predicted wait is over and no call before it has been answered for a
    while: each answer to an earlier call shows that the replica makes progress, and moves the turns of
    those behind it.
    """

    def __init__(self, *, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._number = 0
        self._waiting: dict[str, dict[int, Turn]] = {}

    def enter(self, replica: str, expected_s: float = 0.0) -> Turn:
        """Add a call that the replica is expected to take `expected_s` to come to."""
        self._number += 1
        turn = Turn(replica, self._number, self._clock() + expected_s)
        self._waiting.setdefault(replica, {})[turn.number] = turn
        return turn

    def leave(self, turn: Turn, *, answered: bool) -> None:
        """Remove a call; `answered` if the replica has worked for it. Again: nothing happens."""
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
