"""Placement in an ingress by the load of its own requests, used when the router cannot place."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np

from eldr_serve.errors import OverloadedError
from eldr_serve.router_protocol.messages import LOCAL_FALLBACK
from eldr_serve.scheduling.ledger import LoadLedger
from eldr_serve.scheduling.types import Lease, LeaseState


class LocalFallback:
    """Places one process's requests on the worker on which it holds the fewest leases.

    Args:
        workers: returns the workers that requests can be placed on.
    """

    def __init__(self, workers: Callable[[], tuple[str, ...]]) -> None:
        self._workers = workers
        self._ledger = LoadLedger()

    def add(self, lease: Lease) -> None:
        """Count a lease on its worker; it replaces an earlier lease of the request."""
        self._ledger.add(lease.request_id, lease.worker, lease.request.prompt_tokens)
        self._ledger.set_generated_tokens(lease.request_id, lease.generated_tokens)

    def set_generated_tokens(self, request_id: str, generated_tokens: int) -> None:
        """Update the number of tokens that a request has generated so far."""
        self._ledger.set_generated_tokens(request_id, generated_tokens)

    def release(self, request_id: str) -> None:
        """Remove a lease; ignore an unknown one."""
        self._ledger.release(request_id)

    def lease(self, lease: Lease, reason: str) -> None:
        """Lease the least loaded worker that is not excluded, and break ties randomly.

        Args:
            reason: why the router did not place the request: NO_WORKER, ROUTER_ERROR or ROUTER_UNREACHABLE.

        Raises:
            OverloadedError: no decode replica is known.
        """
        workers = self._workers()
        candidates = [name for name in workers if name not in lease.request.exclude] or list(workers)
        if not candidates:
            raise OverloadedError("no decode replica is running yet", retry_after_s=5)
        self._ledger.name_workers(candidates)
        in_flight = self._ledger.loads(self._ledger.rows_of(candidates)).in_flight
        lease.become(LeaseState.GRANTED)
        least_loaded = np.flatnonzero(in_flight == in_flight.min())
        lease.worker, lease.position = candidates[int(random.choice(least_loaded))], -1
        lease.num_candidates, lease.reason, lease.policy = len(candidates), reason, LOCAL_FALLBACK
        self.add(lease)
