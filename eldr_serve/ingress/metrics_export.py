"""Ray metrics of one ingress replica, from its status and its stage latencies."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from eldr_serve.metrics import EXPERTS, GAUGE, HISTOGRAM, INGRESS, INGRESS_STATUS, LATENCY_PREDICTION, Metric
from eldr_serve.monitoring.ray_metrics import SMALLEST, ray_metrics


class IngressMetrics:
    """Metrics of one ingress replica."""

    def __init__(self) -> None:
        self._ray_metrics = ray_metrics(INGRESS)
        self._seen: dict[tuple[str, ...], float] = {}  # totals of counters, by name and values of labels

    def observe_stage(self, stage: str, seconds: float) -> None:
        """Record the duration of a stage of one request."""
        self._ray_metrics[INGRESS_STATUS["stages"].name].observe(seconds, {"stage": stage})

    def export(self, own: Mapping[str, Any]) -> None:
        """Export the `ingress` entry of the status, except the stages."""
        for key, metric in INGRESS_STATUS.items():
            value = own[key]
            if metric.kind == HISTOGRAM:
                continue
            if metric.labels:
                for worker, worker_value in value.items():
                    self._export_value(metric, worker_value, worker=worker)
            else:
                self._export_value(metric, value)
        for worker, experts in own["experts"].items():
            for key, metric in EXPERTS.items():
                self._export_value(metric, experts[key], worker=worker)
        for latency, totals in own["objectives"].items():
            for key, metric in LATENCY_PREDICTION.items():
                self._export_value(metric, totals[key], latency=latency)

    def _export_value(self, metric: Metric, value: float, **labels: str) -> None:
        """Set a gauge to the value, or increase a counter to it."""
        if metric.kind == GAUGE:
            self._ray_metrics[metric.name].set(float(value), labels)
            return
        key = (metric.name, *labels.values())
        increase = value - self._seen.setdefault(key, -SMALLEST)  # this begins the series
        if increase > 0:
            self._seen[key] = value
            self._ray_metrics[metric.name].inc(float(increase), labels)
