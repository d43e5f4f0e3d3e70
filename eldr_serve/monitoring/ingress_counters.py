"""Events that one ingress counts; the router adds those of all ingresses for `/eldr/status`."""

from __future__ import annotations

from collections import Counter
from enum import StrEnum


class IngressEvent(StrEnum):
    """Events by the names of their counters in the status; `metrics.COUNTERS` describes each of them."""

    BACKGROUND_FAILURES = "background_failures"
    EJECTED = "ejected"
    MOVED = "moved"
    PLACED_BY_LOCAL_FALLBACK = "placed_by_local_fallback"
    PREFILL_RETRIES = "prefill_retries"
    PREFILLS = "prefills"
    PREFIX_TOKENS_MEASURED = "prefix_tokens_measured"
    PREFIX_TOKENS_PREDICTED = "prefix_tokens_predicted"
    QUEUE_EXPIRED = "queue_expired"
    REFUSED_DECODE_BACKLOG = "refused_decode_backlog"
    REFUSED_LIMITS = "refused_limits"
    REFUSED_LOST_ENGINES = "refused_lost_engines"
    REFUSED_OBJECTIVE = "refused_objective"
    REFUSED_OVERLOAD = "refused_overload"
    REFUSED_PENDING_BODIES = "refused_pending_bodies"
    REFUSED_PREFILL_BACKLOG = "refused_prefill_backlog"
    REFUSED_PREFILL_FULL = "refused_prefill_full"
    RESUMED = "resumed"
    ROUTER_LOST = "router_lost"
    SLOW_CLIENTS = "slow_clients"
    STREAMS_LOST = "streams_lost"
    WHOLE_WITHOUT_PREFILL = "whole_without_prefill"


class IngressCounters:
    """The counters of one ingress. Its parts count, and its RouterClient reports the counts."""

    def __init__(self) -> None:
        self._counters: Counter[str] = Counter()

    def count(self, event: IngressEvent, increase: int = 1) -> None:
        """Increase the counter of an event."""
        self._counters[event.value] += increase

    def count_failed_work(self, work: str) -> None:
        """Count a failure of background work, and count it by the name of the work too."""
        self.count(IngressEvent.BACKGROUND_FAILURES)
        self._counters[f"failed_work:{work}"] += 1

    def take(self) -> dict[str, int]:
        """Return the counts since the last call, by name."""
        counts = dict(self._counters)
        self._counters.clear()
        return counts
