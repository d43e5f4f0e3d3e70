"""Outlier ejection, in an ingress, for replicas that fail calls although their channel is open."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from eldr_serve.channel import CallFailedError
from eldr_serve.errors import one_line_message
from eldr_serve.fleet.fleet import Fleet
from eldr_serve.metrics import IngressEvent
from eldr_serve.monitoring.ingress_counters import IngressCounters
from eldr_serve.scheduling.worker_names import replica_of

logger = logging.getLogger(__name__)

FAILURES = 3  # failures in a row, after which a replica is ejected
_FIRST_EJECTION_S = 10.0  # time of the first ejection, doubled for each further one
_MAX_EJECTION_S = 120.0
_RECORD_S = 600.0  # time after the last failure, after which a record is removed


@dataclass
class _Record:
    failures: int = 0  # failures since the last success or ejection
    ejections: int = 0  # ejections since the last success while not ejected
    failed_at_s: float = 0.0
    ejected_until_s: float = 0.0


class OutlierDetector:
    """Ejects replicas whose calls from this ingress fail repeatedly.

    A replica that is not live keeps its record, because a failing one may lose its channel and reconnect.
    A failure of one data-parallel rank counts for its replica, whose ranks share an engine.
    """

    def __init__(
        self, fleet: Fleet, counters: IngressCounters, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._fleet, self._counters, self._clock = fleet, counters, clock
        self._records: dict[str, _Record] = {}

    def record_success(self, worker: str) -> None:
        """Reset the record of the replica of a worker that has answered, unless the replica is ejected."""
        replica = replica_of(worker)
        record = self._records.get(replica)
        # A success during an ejection mostly belongs to a call that began before the ejection.
        if record is not None and self._clock() >= record.ejected_until_s:
            del self._records[replica]

    def record_failure(self, worker: str, error: Exception) -> None:
        """Count a failed call, unless the replica was merely full; eject a replica that fails repeatedly."""
        if isinstance(error, CallFailedError) and error.status == 503:
            return
        replica, now_s = replica_of(worker), self._clock()
        self._records = {
            name: record for name, record in self._records.items() if now_s - record.failed_at_s < _RECORD_S
        }
        record = self._records.setdefault(replica, _Record())
        record.failed_at_s = now_s
        if now_s < record.ejected_until_s:
            return  # the call began before the ejection
        record.failures += 1
        if record.failures < FAILURES:
            return
        record.failures = 0
        ejection_s = min(_FIRST_EJECTION_S * 2**record.ejections, _MAX_EJECTION_S)
        record.ejected_until_s = now_s + ejection_s
        record.ejections += 1
        logger.warning(
            "replica %s has failed %d calls in a row and is ejected for %.0f s; the last error: %s",
            replica,
            FAILURES,
            ejection_s,
            one_line_message(error),
        )
        self._counters.count(IngressEvent.EJECTED)

    @property
    def usable_workers(self) -> list[str]:
        """Return the live workers whose replicas are not ejected, or all of them if more than half are."""
        workers, now_s = list(self._fleet.live_workers), self._clock()
        ejected_replicas = {name for name, record in self._records.items() if now_s < record.ejected_until_s}
        usable_workers = [name for name in workers if replica_of(name) not in ejected_replicas]
        return usable_workers if 2 * len(usable_workers) >= len(workers) else workers
