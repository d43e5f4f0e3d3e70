"""Step costs and active experts, which go from vLLM's workers to its metrics as connector stats.

A worker makes an EldrStats in each step, the engine core adds to it, and the replica's EldrPromMetrics
reports it.
"""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from eldr_serve.engine.vllm.compat.nixl import NixlKVConnectorStats, NixlPromMetrics
from eldr_serve.engine.vllm.measurements import MEASUREMENTS
from eldr_serve.metrics import COUNTER, ENGINE
from eldr_serve.scheduling.prefixes import BlockChanges

_MAX_RECORDS = 4096  # maximum records between two readings of the metrics; the oldest are dropped

# Histogram -> field of a decode step that it observes; counter -> field that it sums (1 per step if empty).
_OBSERVED = {
    "eldr_active_experts": "active_experts",
    "eldr_decode_step_seconds": "seconds",
    "eldr_decode_batch_size": "requests",
}
_SUMMED = {
    "eldr_decode_steps_total": "",
    "eldr_decode_step_experts_total": "active_experts",
    "eldr_decode_step_requests_total": "requests",
    "eldr_decode_seconds_total": "seconds",
}
_TOKEN_SECONDS = "eldr_decode_token_seconds_total"


class EldrStats(KVConnectorStats):
    """NIXL's transfer stats, step records and capture times.

    `data` has these keys. If a step verifies drafts, its experts and KV tokens include the drafts too.

    - nixl: data of NIXL's stats, or None.
    - steps: records of decode steps: requests, kv_tokens, active_experts (mean over layers),
      active_by_layer, seconds. A data-parallel rank records its own requests, and a time that
      includes its wait for the other ranks.
    - prompt_steps: records of steps in which a whole replica computed prompts: requests, kv_tokens,
      prompt_tokens, seconds. A decode engine beside prefill engines has local_prompt_tokens instead of
      prompt_tokens.
    - capture_s: seconds that the counting took in each step.
    - kv_usage, prompt_counts, prefix_changes: added by the scheduler: the share of KV blocks in use, the
      result of `EldrConnectorScheduler.take_prompt_counts`, and the fields of a BlockChanges, if any.
    """

    def __init__(self, data: dict[str, Any] | None = None) -> None:
        super().__init__(data or {})
        if not data:
            self.reset()

    def reset(self) -> None:
        self.data: dict[str, Any] = {"nixl": None, "steps": [], "prompt_steps": [], "capture_s": []}

    def aggregate(self, other: KVConnectorStats) -> EldrStats:
        """Merge another rank's stats; only the first rank reports steps, so none is counted twice."""
        own_nixl, other_nixl = self.data["nixl"], other.data["nixl"]
        if own_nixl and other_nixl:
            merged = NixlKVConnectorStats(data=own_nixl).aggregate(NixlKVConnectorStats(data=other_nixl))
            self.data["nixl"] = merged.data
        else:
            self.data["nixl"] = own_nixl or other_nixl
        for key in ("steps", "prompt_steps", "capture_s"):
            self.data[key] = (self.data[key] + other.data[key])[-_MAX_RECORDS:]
        return self

    def reduce(self) -> dict[str, int | float]:
        records = self.data["steps"]
        summary: dict[str, int | float] = {}
        if records:
            summary = {
                "decode steps": len(records),
                "mean active experts": round(sum(s["active_experts"] for s in records) / len(records), 1),
                "mean step ms": round(1000 * sum(s["seconds"] for s in records) / len(records), 2),
            }
        if self.data["nixl"]:
            summary |= NixlKVConnectorStats(data=self.data["nixl"]).reduce()
        return summary

    def is_empty(self) -> bool:
        nixl = self.data["nixl"]
        return (
            not self.data["steps"]
            and not self.data["prompt_steps"]
            and not self.data["capture_s"]
            and (not nixl or NixlKVConnectorStats(data=nixl).is_empty())
        )


class EldrPromMetrics(KVConnectorPromMetrics):
    """The Prometheus metrics of NIXL and of EldrConnector, with the labels of vLLM's metrics."""

    def __init__(
        self, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: Any
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._nixl = NixlPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._steps = {name: (self._create(name, labelnames), key) for name, key in _OBSERVED.items()}
        self._totals = {name: (self._create(name, labelnames), key) for name, key in _SUMMED.items()}
        self._token_seconds = self._create(_TOKEN_SECONDS, labelnames)
        self._capture = self._create("eldr_capture_seconds", labelnames)

    def _create(self, name: str, labelnames: list[str]) -> dict[int, Any]:
        metric = ENGINE[name]
        about = f"{metric.about}, {metric.unit}"
        if metric.kind == COUNTER:
            vllm_metric = self._counter_cls(name=name, documentation=about, labelnames=labelnames)
        else:
            vllm_metric = self._histogram_cls(
                name=name, documentation=about, buckets=list(metric.bounds), labelnames=labelnames
            )
        return self._label_by_engine(vllm_metric)

    def _label_by_engine(self, metric: Any) -> dict[int, Any]:
        return {engine: metric.labels(*values) for engine, values in self.per_engine_labelvalues.items()}

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Update all metrics from one EldrStats.data, and give its measurements to MEASUREMENTS."""
        if transfer_stats_data.get("nixl"):
            self._nixl.observe(transfer_stats_data["nixl"], engine_idx)
        if "kv_usage" in transfer_stats_data:
            MEASUREMENTS.kv_usage[engine_idx] = transfer_stats_data["kv_usage"]
        if transfer_stats_data.get("prompt_counts"):
            MEASUREMENTS.deliver_counts(transfer_stats_data["prompt_counts"])
        if transfer_stats_data.get("prefix_changes"):
            MEASUREMENTS.change_prefixes(BlockChanges(**transfer_stats_data["prefix_changes"]))
        MEASUREMENTS.add_steps(transfer_stats_data["steps"], transfer_stats_data["prompt_steps"], engine_idx)
        if transfer_stats_data["steps"]:
            self._observe_steps(transfer_stats_data["steps"], engine_idx)
        for seconds in transfer_stats_data["capture_s"]:
            self._capture[engine_idx].observe(seconds)

    def _observe_steps(self, records: list[dict[str, Any]], engine_idx: int) -> None:
        for histogram, key in self._steps.values():
            for step in records:
                histogram[engine_idx].observe(step[key])
        for counter, key in self._totals.values():
            counter[engine_idx].inc(sum(step[key] if key else 1 for step in records))
        self._token_seconds[engine_idx].inc(sum(step["requests"] * step["seconds"] for step in records))
