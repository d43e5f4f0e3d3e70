"""Ray's metrics of our processes, from what the status shows (eldr_serve/metrics.py has the list)."""

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
from eldr_serve.routing import Placement, State
from eldr_serve.serving.messages import Answered, Reply
from eldr_serve.serving.router_state import RouterState

PERIOD_S = 1.0  # between two exports; Ray drops a gauge that was not set for two of its own reports
# Ray makes a counter's series with its first increment, and Prometheus sees no increase in a first sample. So
# each series begins with the least increment that Ray takes, which vanishes in the next one.
_BEGIN = sys.float_info.min


class RouterMetrics:
    """Of the DecodeRouter actor; nothing here is called once a token."""

    def __init__(self) -> None:
        self._made = _made(ROUTER)
        self._seen: Counts[str] = Counts()
        self._begun: set[str] = set()

    def placed(self, state: RouterState, reply: Reply, seconds: float) -> None:
        """A batch of requests was placed in so many seconds."""
        tags = {"policy": state.settings.policy}
        self._made["eldr_route_seconds"].observe(seconds, tags)
        for placement in reply.placements:
            if placement.state is State.LEASED:
                self._made["eldr_band_size"].observe(placement.band, tags)

    def granted(self, state: RouterState, leases: tuple[Placement, ...]) -> None:
        """These have left the decode queue with a worker."""
        tags = {"policy": state.settings.policy}
        for lease in leases:
            self._made["eldr_band_size"].observe(lease.band, tags)
            self._made["eldr_decode_queue_wait_seconds"].observe(lease.waited_s, tags)

    def answered(self, state: RouterState, streams: Iterable[Answered]) -> None:
        """These have ended."""
        tags = {"policy": state.settings.policy}
        for stream in streams:
            self._made["eldr_ttft_seconds"].observe(stream.ttft_s, tags)
            if stream.tpot_s is not None:
                self._made["eldr_tpot_seconds"].observe(stream.tpot_s, tags)

    def export(self, state: RouterState, signatures: Mapping[str, Any] | None = None) -> None:
        """Export the current status as metrics.

        Args:
            signatures: the `signatures` entry of the status.
        """
        status, policy = state.status(), state.settings.policy
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
            if f"eldr_predictor_{name}" in self._made:
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
        self._made[name].set(float(value), tags)

    def _count(self, counters: Mapping[str, int], policy: str) -> None:
        if policy not in self._begun:
            self._begun.add(policy)
            for metric in COUNTED.values():
                self._made[metric.name].inc(_BEGIN, {"policy": policy})
        for key, total in counters.items():
            more, self._seen[key] = total - self._seen[key], total
            name, _, reason = key.partition(":")
            if more <= 0:
                continue
            if reason:
                self._made[BY_REASON.name].inc(more, {"policy": policy, "reason": reason})
            elif name in COUNTED:  # others are of an ingress with newer code, while a new one is rolled out
                self._made[COUNTED[name].name].inc(more, {"policy": policy})

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
    """Of one ingress replica."""

    def __init__(self) -> None:
        self._made = _made(INGRESS)

    def export(self, own: Mapping[str, Any]) -> None:
        """What the status shows under `ingress`."""
        for key, metric in OWN.items():
            gauge, found = self._made[metric.name], own[key]
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
                self._made[metric.name].set(float(held[key]), {"worker": worker})


class LoopMetrics:
    """Of the event loop of one process."""

    def __init__(self) -> None:
        self._made = _made(PROCESS)
        self._seen = 0.0

    def export(self, role: str, status: Mapping[str, Any]) -> None:
        """What the status shows of this loop."""
        tags = {"role": role}
        for key, metric in LOOP.items():
            if metric.kind == GAUGE:
                self._made[metric.name].set(float(status[key]), tags)
            elif more := max(status[key], _BEGIN) - self._seen:
                self._made[metric.name].inc(more, tags)
                self._seen += more


class ReplicaMetrics:
    """Of one engine's replica."""

    def __init__(self) -> None:
        self._made = _made(REPLICA)

    def begin(self, role: str) -> None:
        """The series is there from now on."""
        self._made["eldr_engine_lost_total"].inc(_BEGIN, {"role": role})

    def lost(self, role: str) -> None:
        """The engine was lost, for good or for a while."""
        self._made["eldr_engine_lost_total"].inc(1, {"role": role})


def _made(metrics: Mapping[str, Metric]) -> dict[str, Any]:
    """Ray's objects of these, by name."""
    return {name: _one(metric) for name, metric in metrics.items()}


def _one(metric: Metric) -> Counter | Gauge | Histogram:
    about = f"{metric.about}, {metric.unit}"
    if metric.kind == COUNTER:
        return Counter(metric.name, about, metric.labels)
    if metric.kind == GAUGE:
        return Gauge(metric.name, about, metric.labels)
    return Histogram(metric.name, about, list(metric.bounds), metric.labels)
