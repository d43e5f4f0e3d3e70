"""The estimated time at which a worker has computed a call's prompt; time limits count from then on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(eq=False)
class QueuedCall:
    """One call in the queue of a worker.

    Attributes:
        due_s: time at which the worker is expected to have computed the call's prompt, on the queue's clock;
            the call's time limit starts then.
    """

    worker: str
    number: int
    due_s: float


class DueEstimator:
    """An estimator of when workers have computed the prompts of this process's calls, in order of arrival.

    A call is due at its predicted time. Each answer to an earlier call shows that the worker makes progress,
    and postpones the due times of later calls to that moment at least.
    """

    def __init__(self, *, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._number = 0
        self._waiting: dict[str, dict[int, QueuedCall]] = {}

    def enter(self, worker: str, expected_s: float = 0.0) -> QueuedCall:
        """Add a call whose prompt is expected to be computed after `expected_s` seconds."""
        self._number += 1
        call = QueuedCall(worker, self._number, self._clock() + expected_s)
        self._waiting.setdefault(worker, {})[call.number] = call
        return call

    def num_waiting(self, worker: str) -> int:
        """Return the number of unanswered calls to a worker."""
        return len(self._waiting.get(worker, {}))

    def leave(self, call: QueuedCall, *, answered: bool) -> None:
        """Remove a call; `answered` tells whether its worker has processed it. Ignore a removed call."""
        waiting = self._waiting.get(call.worker, {})
        if waiting.pop(call.number, None) is None:
            return
        if not waiting:
            del self._waiting[call.worker]
        if answered:
            now = self._clock()
            for later in reversed(waiting.values()):
                if later.number < call.number:
                    break
                later.due_s = max(later.due_s, now)
