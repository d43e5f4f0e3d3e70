"""When a decode replica can be expected to work for a call: it begins as many calls as it has seats."""

from __future__ import annotations

import asyncio

from eldr_serve.serving.fleet import Fleet
from eldr_serve.serving.prefill_queue import Report
from eldr_serve.serving.turns import Turn, Turns

SEATS = "eldr_seats"  # in a replica's metadata, see protocol.Engine.seats


class DecodeTurns:
    """The calls of one ingress that have no token yet."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._turns = Turns(clock=_now)
        self.enter, self.leave = self._turns.enter, self._turns.leave

    def since_s(self, turn: Turn) -> float:
        """Return from when a call without a token counts as one that its replica works for."""
        if self._is_full(turn.replica):
            turn.since_s = _now()
        return turn.since_s

    def _is_full(self, replica: str) -> bool:
        directory = self._fleet.directory
        seats: int = directory.metadata.get(replica, {}).get(SEATS, 0)
        told = Report.of(directory.reports.get(replica, {})).calls
        return 0 < seats < max(told, self._fleet.in_flight.get(replica, 0))


def _now() -> float:
    return asyncio.get_running_loop().time()
