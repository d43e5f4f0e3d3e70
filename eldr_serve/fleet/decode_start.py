"""The estimated time at which a decode worker starts on a call: when one of its slots is free."""

from __future__ import annotations

import asyncio
import math

from eldr_serve.engine.report_fields import SLOTS
from eldr_serve.fleet.fleet import Fleet
from eldr_serve.queues.call_start import CallStartEstimator, WaitingCall
from eldr_serve.queues.reports import QueueReport
from eldr_serve.queues.wait_estimate import WaitEstimator
from eldr_serve.scheduling.worker_names import replica_of


class DecodeStartEstimator:
    """Estimates when workers start on the calls of one ingress that have not received a token yet."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._call_starts = CallStartEstimator(clock=_now_s)
        self._waits: dict[str, WaitEstimator] = {}  # estimators of workers with more calls than slots

    def enter(self, worker: str, expected_s: float = 0.0) -> WaitingCall:
        """Add a call whose prompt is expected to be computed after `expected_s` seconds."""
        return self._call_starts.enter(worker, expected_s)

    def leave(self, call: WaitingCall, *, answered: bool) -> None:
        """Remove a call that has its first token or has ended.

        Args:
            answered: whether the worker has started on it.
        """
        num_before = self._call_starts.num_waiting(call.worker)
        self._call_starts.leave(call, answered=answered)
        num_waiting = self._call_starts.num_waiting(call.worker)
        if num_waiting == num_before:
            return
        if num_waiting and self._is_over_full(call.worker):
            self._waits.setdefault(call.worker, WaitEstimator(clock=_now_s)).record_departure(empty=False)
        else:  # the next wait starts a new estimate, and a lost worker needs none
            self._waits.pop(call.worker, None)

    def estimate_wait_s(self) -> float:
        """Estimate the wait of a new request for the first free slot of any worker, s."""
        workers = self._fleet.live_workers
        if not all(map(self._is_over_full, workers)):  # often the first one already has a free slot
            return 0.0
        if any(name not in self._waits for name in workers):
            return 0.0
        return min(
            (self._waits[name].estimate_wait_s(self._call_starts.num_waiting(name) + 1) for name in workers),
            default=0.0,
        )

    def postpone_if_full(self, call: WaitingCall) -> float:
        """Postpone a call's expected start to now if other answers fill the worker, and return the start.

        The call waits for a slot while its worker has more calls than slots and other calls may be
        generating, whose tokens have a time limit. If no call has a token yet, only first tokens and ends
        of calls postpone the start.
        """
        worker, num_waiting = call.worker, self._call_starts.num_waiting(call.worker)
        if self._is_over_full(worker) and self._num_calls(worker) > num_waiting:
            call.expected_start_at_s = _now_s()
        return call.expected_start_at_s

    def num_free_slots(self, worker: str) -> float:
        """Return the number of further calls that a live worker could start now; inf if unknown."""
        num_slots = self.num_slots(worker)
        return max(num_slots - self._num_calls(worker), 0) if num_slots else math.inf

    def num_slots(self, worker: str) -> int:
        """Return the number of slots of a worker; 0 if unknown."""
        num_slots: int = self._fleet.directory.metadata.get(replica_of(worker), {}).get(SLOTS, 0)
        return num_slots

    def _num_calls(self, worker: str) -> int:
        report = self._fleet.directory.reports.get(worker, QueueReport())
        return max(report.calls, self._fleet.slot_calls_of(worker))

    def _is_over_full(self, worker: str) -> bool:
        return 0 < self.num_slots(worker) < self._num_calls(worker)


def _now_s() -> float:
    return asyncio.get_running_loop().time()
