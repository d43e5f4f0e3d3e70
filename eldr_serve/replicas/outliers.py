"""Outlier ejection for replicas that fail calls although their channel is open."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from eldr_serve.channel import CallFailed
from eldr_serve.replicas.fleet import Fleet

logger = logging.getLogger(__name__)

FAILURES = 3  # in a row
_FIRST_EJECTION_S = 10.0  # doubled for each further ejection
_MAX_EJECTION_S = 120.0


@dataclass
class _Record:
    failures: int = 0  # since the last success or ejection
    ejections: int = 0  # since the last success
    until_s: float = 0.0


class Outliers:
    """Outlier ejection for the replicas of one deployment, by the calls of one ingress."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._records: dict[str, _Record] = {}

    def succeeded(self, replica: str) -> None:
        """Reset the record of a replica that has answered."""
        self._records.pop(replica, None)

    def failed(self, replica: str) -> bool:
        """Count a failed call; return whether the replica is now ejected for it."""
        record = self._records.setdefault(replica, _Record())
        if self._clock() < record.until_s:
            return False  # the call began before the ejection
        record.failures += 1
        if record.failures < FAILURES:
            return False
        record.failures = 0
        record.until_s = self._clock() + min(_FIRST_EJECTION_S * 2**record.ejections, _MAX_EJECTION_S)
        record.ejections += 1
        return True

    def usable(self, replicas: Iterable[str]) -> list[str]:
        """Return the replicas that are not ejected, or all of them if more than half are."""
        names, now = list(replicas), self._clock()
        self._records = {name: record for name, record in self._records.items() if name in names}
        found = [name for name in names if name not in self._records or now >= self._records[name].until_s]
        return found if 2 * len(found) >= len(names) else names


class ReplicaHealth:
    """Outlier ejection for the replicas of one fleet: replicas that fail repeatedly are set aside.

    Args:
        count: callback that counts an event of this name.
    """

    def __init__(self, fleet: Fleet, count: Callable[[str], None]) -> None:
        self._fleet = fleet
        self.count = count
        self._outliers = Outliers()
        self.succeeded = self._outliers.succeeded

    @property
    def usable(self) -> list[str]:
        """Return the live replicas that are not set aside."""
        return self._outliers.usable(self._fleet.live)

    def failed(self, replica: str, error: Exception) -> None:
        """Count a failed call, unless the replica was merely full."""
        full = isinstance(error, CallFailed) and error.status == 503
        if not full and self._outliers.failed(replica):
            logger.warning("replica %s fails repeatedly and is set aside for a while", replica)
            self.count("set_aside")
