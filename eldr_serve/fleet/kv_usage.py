"""The choice of prefill replicas with free KV cache, from the reports that they send every second."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from eldr_serve.engine.report_fields import KV_USAGE, REPORT_NUMBER

_STALE_S = 10.0


@dataclass(frozen=True)
class _Report:
    number: int
    usage: float
    at_s: float


class KvUsage:
    """The KV usage of workers, for back-pressure before prefill, where blocks stay until decode reads them.

    A worker whose reports have stopped counts as full, so that an old low value attracts no prompts.
    If all reports have stopped, the fault is assumed to be in reporting, and no worker counts as full.
    A worker that has never sent a report has just started and counts as empty.

    Args:
        max_usage: a replica with more than this share of its KV blocks in use gets no new prompt, 0 to 1.
    """

    def __init__(self, max_usage: float = 1.0, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.max_usage = max_usage
        self._clock = clock
        self._newest: dict[str, _Report] = {}

    def update(self, reports: Mapping[str, Mapping[str, Any]]) -> None:
        """Process the newest reports of all live workers, by name."""
        now_s = self._clock()
        before, self._newest = self._newest, {}
        for name, report in reports.items():
            number, usage = report.get(REPORT_NUMBER), report.get(KV_USAGE)
            last = before.get(name)
            if number is not None and usage is not None and (last is None or last.number != number):
                last = _Report(number, usage, now_s)
            if last is not None:
                self._newest[name] = last

    @property
    def usage_by_worker(self) -> dict[str, float]:
        """Return the newest report of each worker that has sent one: share of KV blocks in use, 0 to 1."""
        return {name: report.usage for name, report in self._newest.items()}

    def replicas_with_room(self, replicas: Iterable[str]) -> list[str]:
        """Return the prefill replicas that may get a prompt."""
        names, now_s = list(replicas), self._clock()
        newest = {name: self._newest.get(name) for name in names}
        is_current = {name: last is None or now_s - last.at_s <= _STALE_S for name, last in newest.items()}
        if not any(is_current.values()):
            return names
        return [name for name in names if is_current[name] and self._has_room(newest[name])]

    def _has_room(self, report: _Report | None) -> bool:
        return report is None or report.usage <= self.max_usage
