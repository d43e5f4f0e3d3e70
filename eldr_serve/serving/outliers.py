"""Replicas that fail calls although their channel is open are set aside for a while."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

FAILURES = 3  # in a row
_ASIDE_S = 10.0  # the first time; then doubled, up to
_MOST_S = 120.0


@dataclass
class _Record:
    failures: int = 0  # since the last success, or since it was last set aside
    times: int = 0  # that it was set aside since the last success
    until_s: float = 0.0


class Outliers:
    """Of one deployment, as one ingress sees it."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._records: dict[str, _Record] = {}

    def succeeded(self, replica: str) -> None:
        """It has answered."""
        self._records.pop(replica, None)

    def failed(self, replica: str) -> bool:
        """It has not; whether it is set aside for that, from now on."""
        record = self._records.setdefault(replica, _Record())
        if self._clock() < record.until_s:
            return False  # a call of before
        record.failures += 1
        if record.failures < FAILURES:
            return False
        record.failures = 0
        record.until_s = self._clock() + min(_ASIDE_S * 2**record.times, _MOST_S)
        record.times += 1
        return True

    def usable(self, replicas: Iterable[str]) -> list[str]:
        """Those not set aside; all of them, if those would be less than half: then it is not they."""
        names, now = list(replicas), self._clock()
        self._records = {name: record for name, record in self._records.items() if name in names}
        found = [name for name in names if name not in self._records or now >= self._records[name].until_s]
        return found if 2 * len(found) >= len(names) else names
