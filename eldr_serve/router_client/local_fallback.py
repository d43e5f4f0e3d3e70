"""Placement in an ingress by the load of its own requests, used when the router cannot place."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

from eldr_serve.errors import OverloadedError
from eldr_serve.router_protocol.messages import LOCAL_FALLBACK
from eldr_serve.scheduling.types import Lease, LeaseState


class LocalFallback:
    """Places one process's requests on the worker on which it holds the fewest leases.

    Args:
        workers: returns the workers that requests can be placed on.
    """

    def __init__(self, workers: Callable[[], tuple[str, ...]]) -> None:
        self._workers = workers
        self._worker_of: dict[str, str] = {}  # worker of each lease, by request id
        self._num_leases: Counter[str] = Counter()  # number of leases on each worker

    def __len__(self) -> int:
        return len(self._worker_of)

    def add(self, lease: Lease) -> None:
        """Count a lease on its worker; it replaces an earlier lease of the request."""
        self.release(lease.request_id)
        self._worker_of[lease.request_id] = lease.worker
        self._num_leases[lease.worker] += 1

    def release(self, request_id: str) -> None:
        """Remove a lease; ignore an unknown one."""
        worker = self._worker_of.pop(request_id, None)
        if worker is not None:
            self._num_leases[worker] -= 1
            if not self._num_leases[worker]:
                del self._num_leases[worker]

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
        lease.become(LeaseState.GRANTED)
        fewest = min(self._num_leases[name] for name in candidates)
        least_loaded = [name for name in candidates if self._num_leases[name] == fewest]
        lease.worker, lease.position = random.choice(least_loaded), -1
        lease.num_candidates, lease.reason, lease.policy = len(candidates), reason, LOCAL_FALLBACK
        self.add(lease)
