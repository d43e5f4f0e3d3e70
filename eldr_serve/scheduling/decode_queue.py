"""The decode queue: requests that wait for a worker, and the order of their turns."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

from eldr_serve.scheduling.fairness import fair_order
from eldr_serve.scheduling.types import Lease, LeaseState


class DecodeQueue:
    """The requests that wait for a worker, and the order of their turns.

    Args:
        clock: time source for waits, s.

    Attributes:
        leases: leases of the waiting requests, by id, in order of arrival.
        patience_s: assumed time to the first-token deadline of a request without an objective, s; the router
            sets half of the longest wait.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self.leases: dict[str, Lease] = {}
        self.patience_s = 5.0
        self._clock = clock

    def add(self, lease: Lease) -> None:
        """Add a request. If it waits already, it keeps its place, its time of entry and its deadline."""
        before = self.leases.get(lease.request_id)
        now_s = self._clock()
        lease.queued_at_s = now_s if before is None else before.queued_at_s
        if before is not None:
            lease.first_token_deadline_s = before.first_token_deadline_s
        elif lease.request.first_token_due_in_s is not None:
            lease.first_token_deadline_s = now_s + lease.request.first_token_due_in_s
        lease.become(LeaseState.QUEUED)
        self.leases[lease.request_id] = lease

    def remove_assigned(self, lease: Lease) -> None:
        """Remove a request that gets a worker, if it waits, and record its wait."""
        if self.leases.pop(lease.request_id, None) is lease:
            lease.waited_s = self._clock() - lease.queued_at_s

    def end(self, request_id: str) -> bool:
        """End a request if it waits; return whether it did."""
        lease = self.leases.pop(request_id, None)
        if lease is None:
            return False
        lease.become(LeaseState.ENDED)
        return True

    def in_turn(self, running: Iterable[Lease]) -> list[Lease]:
        """Return the queue in the order of the tenants' fair shares, each tenant's requests by deadline.

        Every request has a deadline, so every request has its turn. Without an objective, or if the first
        token is late already, the deadline is `patience_s` after the arrival. Requests without objectives are
        therefore in the order of arrival.

        Args:
            running: leases of the requests that hold a worker; they count towards their tenants' shares.
        """
        waiting = list(self.leases.values())
        if any(lease.first_token_deadline_s is not None for lease in waiting):
            now_s = self._clock()
            waiting.sort(key=lambda lease: _turn_s(lease, now_s, self.patience_s))
        tenants = [(lease.request.tenant, lease.request.priority) for lease in waiting]
        if len(set(tenants)) < 2:
            return waiting
        num_running = Counter(lease.request.tenant for lease in running)
        return [waiting[index] for index in fair_order(tenants, num_running)]


def _turn_s(lease: Lease, now_s: float, patience_s: float) -> float:
    """Return the deadline of a waiting request, by which it takes its turn."""
    patient_s = lease.queued_at_s + patience_s
    deadline_s = lease.first_token_deadline_s
    return patient_s if deadline_s is None or deadline_s < now_s else min(deadline_s, patient_s)
