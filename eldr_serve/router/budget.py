"""Select prefill replicas with free KV cache, by the reports that they send every second."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

KV_USAGE = "eldr_kv_usage"  # field of a replica's report: share of KV blocks in use, 0 to 1
SAMPLE = "eldr_sample"  # sequence number of the sample; it repeats if there is no new sample
_STALE_S = 10.0


@dataclass(frozen=True)
class _Sample:
    number: int
    usage: float
    at_s: float


class PrefillBudget:
    """Back-pressure before prefill: a prompt's blocks stay on its prefill engine until decode reads them.

    A replica whose samples have stopped counts as full, so that an old low value attracts no prompts.
    If all samples have stopped, assume that reporting failed, not the engines, and count no replica as
    full. A replica that has never sent a sample has just started and counts as empty.

    Args:
        max_usage: a replica with more than this share of its KV blocks in use gets no new prompt, 0 to 1.
    """

    def __init__(self, max_usage: float = 1.0, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.max_usage = max_usage
        self._clock = clock
        self._samples: dict[str, _Sample] = {}
        self._lock = threading.Lock()  # written by Serve's thread, read by the ingress

    def take(self, stats: Mapping[str, Mapping[str, Any]]) -> None:
        """Process the newest reports of all live replicas, by name."""
        now = self._clock()
        with self._lock:
            before, self._samples = self._samples, {}
            for name, report in stats.items():
                number, usage = report.get(SAMPLE), report.get(KV_USAGE)
                last = before.get(name)
                if number is not None and usage is not None and (last is None or last.number != number):
                    last = _Sample(number, usage, now)
                if last is not None:
                    self._samples[name] = last

    @property
    def usage(self) -> dict[str, float]:
        """Return the newest sample of each replica that has sent one: share of KV blocks in use, 0 to 1."""
        with self._lock:
            return {name: sample.usage for name, sample in self._samples.items()}

    def with_room(self, replicas: Iterable[str]) -> list[str]:
        """Return those of `replicas` that may get a prompt."""
        names, now = list(replicas), self._clock()
        with self._lock:
            samples = {name: self._samples.get(name) for name in names}
        fresh = {name: s is None or now - s.at_s <= _STALE_S for name, s in samples.items()}
        if not any(fresh.values()):
            return names
        return [name for name in names if fresh[name] and self._has_room(samples[name])]

    def _has_room(self, sample: _Sample | None) -> bool:
        return sample is None or sample.usage <= self.max_usage
