"""Ray metrics of the DecodeRouter actor, from its status."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from eldr_serve.metrics import COUNTERS, COUNTERS_BY_NAME, ROUTER
from eldr_serve.monitoring.ray_metrics import SMALLEST, ray_metrics
from eldr_serve.router.state import RouterState
from eldr_serve.router.status import router_status
from eldr_serve.router_protocol.messages import StreamLatencies
from eldr_serve.scheduling import Lease


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
        """Export the current status as metrics.

        Args:
            signatures: the `signatures` entry of the status.
        """
        status, policy = router_status(state), state.settings.policy
        self._count(status["counters"], policy)
        tags = {"policy": policy}
        self._set("eldr_leases", status["leases"], tags)
        self._set("eldr_ingresses", status["ingresses"], tags)
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
            tags = {"worker": worker["worker"], "policy": policy}
            self._set("eldr_decode_in_flight", worker["in_flight"], tags)
            self._set("eldr_decode_kv_tokens", worker["kv_tokens"], tags)

    def _set(self, name: str, value: float, tags: dict[str, str] | None = None) -> None:
        self._ray_metrics[name].set(float(value), tags)

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

    def _compare(self, comparison: dict[str, Any] | None) -> None:
        if comparison is None:
            return
        tags = {"policy": comparison["live"]["name"], "shadow": comparison["shadow"]["name"]}
        for key, name in (("change_pct", ""), ("low_pct", "_low"), ("high_pct", "_high")):
            if comparison.get(key) is not None:
                self._set(f"eldr_shadow_change{name}_ratio", comparison[key] / 100, tags)
        for name in ("live", "measured"):
            if comparison.get(f"{name}_ms") is not None:
                self._set(f"eldr_shadow_{name}_seconds", comparison[f"{name}_ms"] / 1000, tags)
