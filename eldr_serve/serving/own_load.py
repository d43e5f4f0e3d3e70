"""Placement by the load of one process's own requests, where the router cannot say."""

from __future__ import annotations

import random

import numpy as np

from eldr_serve.errors import Overloaded
from eldr_serve.routing import LoadLedger, Placement, State
from eldr_serve.serving.replicas import Replicas


class OwnLoad:
    """Counts the leases of one process, and leases the replica with the fewest of them."""

    def __init__(self, replicas: Replicas) -> None:
        self._replicas = replicas
        self._ledger = LoadLedger()

    def take(self, lease: Placement) -> None:
        """It runs on its replica from now on; one that ran elsewhere leaves there."""
        self._ledger.add(lease.request_id, lease.replica, lease.request.prompt_tokens)
        self._ledger.progress(lease.request_id, lease.generated_tokens)

    def progress(self, request_id: str, generated_tokens: int) -> None:
        """It has generated so many tokens in all."""
        self._ledger.progress(request_id, generated_tokens)

    def release(self, request_id: str) -> None:
        """It runs no longer; unknown ones are ignored."""
        self._ledger.release(request_id)

    def lease(self, placement: Placement, reason: str) -> None:
        """Lease the least loaded replica that has not failed the request; several processes differ in ties.

        Raises:
            Overloaded: no decode replica is known at all.
        """
        live = self._replicas.live
        candidates = [r for r in live if r not in placement.request.exclude] or list(live)
        if not candidates:
            raise Overloaded("no decode replica is running yet", retry_after_s=5)
        in_flight = self._ledger.loads(self._ledger.places(candidates)).in_flight
        placement.become(State.LEASED)
        least = np.flatnonzero(in_flight == in_flight.min())
        placement.replica, placement.slot = candidates[int(random.choice(least))], -1
        placement.band, placement.reason, placement.policy = len(candidates), reason, "own-load"
        self.take(placement)
