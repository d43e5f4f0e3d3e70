"""The estimated time at which a worker starts to answer a call; time limits count from then on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(eq=False)
class WaitingCall:
    """One call to a worker that has not answered yet.

    Attributes:
        expected_start_at_s: time at which the worker is expected to start on the call's answer, on the
            estimator's clock; the call's time limit starts then.
    """

    worker: str
    number: int
    expected_start_at_s: float


class CallStartEstimator:
    """Estimates when workers start to answer this process's calls, in order of arrival.

    Since an answer to an earlier call shows that the worker makes progress, later calls are then expected to
    start at the time of that answer or later.
    """

    def __init__(self, *, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._number = 0
        self._waiting: dict[str, dict[int, WaitingCall]] = {}

    def enter(self, worker: str, expected_s: float = 0.0) -> WaitingCall:
        """Add a call whose answer is expected to start after `expected_s` seconds."""
        self._number += 1
        call = WaitingCall(worker, self._number, self._clock() + expected_s)
        self._waiting.setdefault(worker, {})[call.number] = call
        return call

    def num_waiting(self, worker: str) -> int:
        """Return the number of unanswered calls to a worker."""
        return len(self._waiting.get(worker, {}))

    def leave(self, call: WaitingCall, *, answered: bool) -> None:
        """Remove a call; `answered` tells whether its worker has processed it. Ignore a removed call."""
        waiting = self._waiting.get(call.worker, {})
        if waiting.pop(call.number, None) is None:
            return
        if not waiting:
            del self._waiting[call.worker]
        if answered:
            now_s = self._clock()
            for later in reversed(waiting.values()):
                if later.number < call.number:
                    break
                later.expected_start_at_s = max(later.expected_start_at_s, now_s)
