"""Counters of one ingress; the router adds up the counts of all ingresses for `/eldr/status`."""

from __future__ import annotations

from collections import Counter

from eldr_serve.metrics import IngressEvent, NamedCounter


class IngressCounters:
    """The counters of one ingress. Its parts count, and its RouterClient reports the counts."""

    def __init__(self) -> None:
        self._counters: Counter[str] = Counter()

    def count(self, event: IngressEvent, increase: int = 1) -> None:
        """Increase the counter of an event."""
        self._counters[event.value] += increase

    def count_failed_work(self, work: str) -> None:
        """Count a failure of background work, in total and by the name of the work."""
        self.count(IngressEvent.BACKGROUND_FAILURES)
        self._counters[NamedCounter.FAILED_WORK.key(work)] += 1

    def take(self) -> dict[str, int]:
        """Return the counts since the last call, by name."""
        counts = dict(self._counters)
        self._counters.clear()
        return counts
