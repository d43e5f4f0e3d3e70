"""Estimate when a decode replica, which works on one call per slot, starts to work on a call."""

from __future__ import annotations

import asyncio

from eldr_serve.queues.prefill_queue import Report
from eldr_serve.queues.turns import Turn, Turns
from eldr_serve.queues.wait_estimate import WaitEstimate
from eldr_serve.replicas.fleet import Fleet

SLOTS = "eldr_slots"  # field of a replica's metadata, see protocol.Engine.slots


class DecodeTurns:
    """Calls of one ingress that have not received a token yet."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._turns = Turns(clock=_now)
        self.enter = self._turns.enter
        self._waits: dict[str, WaitEstimate] = {}  # of replicas with more calls than slots

    def leave(self, turn: Turn, *, answered: bool) -> None:
        """Remove a call that has its first token or has ended; see Turns.leave."""
        before = self._turns.waiting(turn.replica)
        self._turns.leave(turn, answered=answered)
        waiting = self._turns.waiting(turn.replica)
        if waiting == before:
            return
        if waiting and self._is_full(turn.replica):
            self._waits.setdefault(turn.replica, WaitEstimate(clock=_now)).departed(empty=False)
        else:  # start over; a replica that has gone is not full either
            self._waits.pop(turn.replica, None)

    def wait_s(self) -> float:
        """Return the predicted wait of a new request for the first free slot of any replica, s."""
        live = self._fleet.live
        if not all(map(self._is_full, live)):  # most often the first replica has a slot
            return 0.0
        if any(name not in self._waits for name in live):
            return 0.0
        return min((self._waits[name].wait_s(self._turns.waiting(name) + 1) for name in live), default=0.0)

    def since_s(self, turn: Turn) -> float:
        """Return the time at which the replica is assumed to have started on a call without a token yet."""
        if self._is_full(turn.replica):
            turn.since_s = _now()
        return turn.since_s

    def _is_full(self, replica: str) -> bool:
        directory = self._fleet.directory
        slots: int = directory.metadata.get(replica, {}).get(SLOTS, 0)
        reported = Report.of(directory.reports.get(replica, {})).calls
        return 0 < slots < max(reported, self._fleet.in_flight.get(replica, 0))


def _now() -> float:
    return asyncio.get_running_loop().time()
