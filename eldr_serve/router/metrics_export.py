"""Ray metrics of the DecodeRouter actor, from its status."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from eldr_serve.metrics import COUNTERS, COUNTERS_BY_NAME, GAUGE, ROUTER
from eldr_serve.monitoring.ray_metrics import SMALLEST, ray_metrics
from eldr_serve.router.state import RouterState
from eldr_serve.router.status import router_status
from eldr_serve.router_protocol.messages import StreamLatencies
from eldr_serve.scheduling.types import Lease

_SCALES = {"ms": 1000.0, "pct": 100.0}  # number of the status's units in one unit of the metric


class RouterMetrics:
    """Metrics of the DecodeRouter actor; no method is called for each token."""

    def __init__(self) -> None:
        self._ray_metrics = ray_metrics(ROUTER)
        self._exported_counts: Counter[str] = Counter()
        self._policies: set[str] = set()  # policies with counters

    def record_placement(self, state: RouterState, seconds: float) -> None:
        """Record the placement of a batch of requests, which took `seconds`."""
        self._ray_metrics["eldr_route_seconds"].observe(seconds, {"policy": state.settings.policy})

    def record_leases(self, state: RouterState, leases: Iterable[Lease]) -> None:
        """Record granted leases."""
        tags = {"policy": state.settings.policy}
        for lease in leases:
            self._ray_metrics["eldr_candidates"].observe(lease.num_candidates, tags)

    def record_wait(self, state: RouterState, lease: Lease) -> None:
        """Record the wait of a lease from the decode queue."""
        tags = {"policy": state.settings.policy}
        self._ray_metrics["eldr_decode_queue_wait_seconds"].observe(lease.waited_s, tags)

    def record_streams(self, state: RouterState, streams: Iterable[StreamLatencies]) -> None:
        """Record finished streams."""
        tags = {"policy": state.settings.policy}
        for stream in streams:
            self._ray_metrics["eldr_ttft_seconds"].observe(stream.ttft_s, tags)
            if stream.tpot_s is not None:
                self._ray_metrics["eldr_tpot_seconds"].observe(stream.tpot_s, tags)

    def export(self, state: RouterState, signatures: Mapping[str, Any] | None = None) -> None:
        """Export the current status as metrics; each gauge of ROUTER names its place in the status.

        Args:
            signatures: the `signatures` entry of the status.
        """
        status, settings = router_status(state) | {"signatures": signatures}, state.settings
        status["table"] = status["table"] or {"version": settings.table_version}
        self._count(status["counters"], settings.policy)
        now = status["comparison"]["now"] or {"shadow": {"name": ""}}
        labels = {"policy": settings.policy, "shadow": now["shadow"]["name"]}
        for metric in ROUTER.values():
            if metric.kind == GAUGE:
                *path, key = metric.status.split(".")
                part: Any = status
                for name in path:
                    part = part[name] or {}
                for entry in part if isinstance(part, list) else [part]:
                    if (value := entry.get(key)) is not None:
                        tags = {label: (entry | labels)[label] for label in metric.labels}
                        scaled = float(value) / _SCALES.get(key.rpartition("_")[2], 1.0)
                        self._ray_metrics[metric.name].set(scaled, tags)

    def _count(self, counters: Mapping[str, int], policy: str) -> None:
        if policy not in self._policies:
            self._policies.add(policy)
            for metric in COUNTERS.values():
                self._ray_metrics[metric.name].inc(SMALLEST, {"policy": policy})
        for key, total in counters.items():
            increase, self._exported_counts[key] = total - self._exported_counts[key], total
            kind, _, name = key.partition(":")
            if increase <= 0:
                continue
            if name and kind in COUNTERS_BY_NAME:
                _, label = COUNTERS_BY_NAME[kind].labels
                self._ray_metrics[COUNTERS_BY_NAME[kind].name].inc(increase, {"policy": policy, label: name})
            elif key in COUNTERS:  # unknown counters come from newer ingresses during a rollout
                self._ray_metrics[COUNTERS[key].name].inc(increase, {"policy": policy})
