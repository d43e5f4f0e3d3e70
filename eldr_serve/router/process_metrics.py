"""Ray metrics of our processes, from their status (eldr_serve/metrics.py has the list)."""

from __future__ import annotations

import sys
from collections import Counter as Counts
from collections.abc import Iterable, Mapping
from typing import Any

from ray.util.metrics import Counter, Gauge, Histogram

from eldr_serve.metrics import (
    BY_REASON,
    COUNTED,
    COUNTER,
    EXPERTS,
    GAUGE,
    INGRESS,
    LOOP,
    OWN,
    PROCESS,
    REPLICA,
    ROUTER,
    Metric,
)
from eldr_serve.router.messages import Answered
from eldr_serve.router.state import RouterState
from eldr_serve.router.status import router_status
from eldr_serve.scheduling import Lease

PERIOD_S = 1.0  # export interval; Ray drops a gauge that is not set for two of its own reports
# Ray creates a counter's series at its first increment, and Prometheus sees no increase in a first sample. So
# each series begins with the smallest increment that Ray accepts, which vanishes in the next one.
_SMALLEST = sys.float_info.min


class RouterMetrics:
    """Metrics of the DecodeRouter actor; no method is called for each token."""

    def __init__(self) -> None:
        self._ray_metrics = _ray_metrics(ROUTER)
        self._seen: Counts[str] = Counts()
        self._created: set[str] = set()

    def placed(self, state: RouterState, seconds: float) -> None:
        """Record the placement of a batch of requests, which took `seconds`."""
        self._ray_metrics["eldr_route_seconds"].observe(seconds, {"policy": state.settings.policy})

    def leased(self, state: RouterState, leases: Iterable[Lease]) -> None:
        """Record new leases."""
        tags = {"policy": state.settings.policy}
        for lease in leases:
            self._ray_metrics["eldr_candidates"].observe(lease.num_candidates, tags)

    def waited(self, state: RouterState, lease: Lease) -> None:
        """Record the wait of a lease from the decode queue."""
        tags = {"policy": state.settings.policy}
        self._ray_metrics["eldr_decode_queue_wait_seconds"].observe(lease.waited_s, tags)

    def answered(self, state: RouterState, streams: Iterable[Answered]) -> None:
        """Record finished streams."""
        tags = {"policy": state.settings.policy}
        for stream in streams:
            self._ray_metrics["eldr_ttft_seconds"].observe(stream.ttft_s, tags)
            if stream.tpot_s is not None:
                self._ray_metrics["eldr_tpot_seconds"].observe(stream.tpot_s, tags)

    def export(self, state: RouterState, signatures: Mapping[str, Any] | None = None) -> None:
        """Export the current status as metrics.

        Args:
            signatures: the `signatures` entry of the status.
        """
        status, policy = router_status(state), state.settings.policy
        self._count(status["counters"], policy)
        tags = {"policy": policy}
        self._set("eldr_leases", status["leases"], tags)
        self._set("eldr_clients", status["clients"], tags)
        self._set("eldr_decode_queue_size", status["decode_queue"]["size"], tags)
        self._set("eldr_decode_queue_oldest_wait_seconds", status["decode_queue"]["oldest_wait_s"], tags)
        self._set("eldr_table_version", state.settings.table_version, tags)
        if status["table"] is not None:
            self._set("eldr_refit_advised", status["table"]["refit_advised"], tags)
        if "relative_error" in status["step_cost"]:
            self._set("eldr_step_cost_error_ratio", status["step_cost"]["relative_error"], tags)
        for name, value in (status["predictor"] or {}).items():
            if f"eldr_predictor_{name}" in self._ray_metrics:
                self._set(f"eldr_predictor_{name}", value)
        if signatures is not None and "samples" in signatures:
            self._set("eldr_signature_samples", signatures["samples"])
            self._set("eldr_signature_share_ratio", signatures["share"])
        self._compare(status["comparison"]["now"])
        for worker in status["workers"]:
            tags = {"worker": worker["replica"], "policy": policy}
            self._set("eldr_decode_in_flight", worker["in_flight"], tags)
            self._set("eldr_decode_kv_tokens", worker["kv_tokens"], tags)

    def _set(self, name: str, value: float, tags: dict[str, str] | None = None) -> None:
        self._ray_metrics[name].set(float(value), tags)

    def _count(self, counters: Mapping[str, int], policy: str) -> None:
        if policy not in self._created:
            self._created.add(policy)
            for metric in COUNTED.values():
                self._ray_metrics[metric.name].inc(_SMALLEST, {"policy": policy})
        for key, total in counters.items():
            more, self._seen[key] = total - self._seen[key], total
            name, _, reason = key.partition(":")
            if more <= 0:
                continue
            if reason:
                self._ray_metrics[BY_REASON.name].inc(more, {"policy": policy, "reason": reason})
            elif name in COUNTED:  # unknown counters come from newer ingresses during a rollout
                self._ray_metrics[COUNTED[name].name].inc(more, {"policy": policy})

    def _compare(self, now: dict[str, Any] | None) -> None:
        if now is None:
            return
        tags = {"policy": now["live"]["name"], "shadow": now["shadow"]["name"]}
        for key, name in (("change_pct", ""), ("low_pct", "_low"), ("high_pct", "_high")):
            if now.get(key) is not None:
                self._set(f"eldr_shadow_change{name}_ratio", now[key] / 100, tags)
        for name in ("live", "measured"):
            if now.get(f"{name}_ms") is not None:
                self._set(f"eldr_shadow_{name}_seconds", now[f"{name}_ms"] / 1000, tags)


class IngressMetrics:
    """Metrics of one ingress replica."""

    def __init__(self) -> None:
        self._ray_metrics = _ray_metrics(INGRESS)

    def export(self, own: Mapping[str, Any]) -> None:
        """Export the `ingress` entry of the status."""
        for key, metric in OWN.items():
            gauge, found = self._ray_metrics[metric.name], own[key]
            if key == "stages":
                for stage, times in found.items():
                    for quantile, shown in (("0.5", "p50_ms"), ("0.99", "p99_ms")):
                        gauge.set(times[shown] / 1000, {"stage": stage, "quantile": quantile})
            elif metric.labels:
                for worker, value in found.items():
                    gauge.set(float(value), {"worker": worker})
            else:
                gauge.set(float(found))
        for worker, held in own["experts"].items():
            for key, metric in EXPERTS.items():
                self._ray_metrics[metric.name].set(float(held[key]), {"worker": worker})


class LoopMetrics:
    """Metrics of one process's event loop."""

    def __init__(self) -> None:
        self._ray_metrics = _ray_metrics(PROCESS)
        self._seen = 0.0

    def export(self, role: str, status: Mapping[str, Any]) -> None:
        """Export the status of the loop."""
        tags = {"role": role}
        for key, metric in LOOP.items():
            if metric.kind == GAUGE:
                self._ray_metrics[metric.name].set(float(status[key]), tags)
            elif more := max(status[key], _SMALLEST) - self._seen:
                self._ray_metrics[metric.name].inc(more, tags)
                self._seen += more


class ReplicaMetrics:
    """Metrics of one engine replica."""

    def __init__(self) -> None:
        self._ray_metrics = _ray_metrics(REPLICA)

    def begin(self, role: str) -> None:
        """Create the series."""
        self._ray_metrics["eldr_engine_lost_total"].inc(_SMALLEST, {"role": role})

    def lost(self, role: str) -> None:
        """Count a loss of the engine, permanent or temporary."""
        self._ray_metrics["eldr_engine_lost_total"].inc(1, {"role": role})


def _ray_metrics(metrics: Mapping[str, Metric]) -> dict[str, Any]:
    """Return Ray's metric objects by name."""
    return {name: _ray_metric(metric) for name, metric in metrics.items()}


def _ray_metric(metric: Metric) -> Counter | Gauge | Histogram:
    about = f"{metric.about}, {metric.unit}"
    if metric.kind == COUNTER:
        return Counter(metric.name, about, metric.labels)
    if metric.kind == GAUGE:
        return Gauge(metric.name, about, metric.labels)
    return Histogram(metric.name, about, list(metric.bounds), metric.labels)
