"""Ray metrics of one ingress replica, from its status."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from eldr_serve.metrics import EXPERTS, GAUGE, INGRESS, INGRESS_STATUS, LATENCY_PREDICTION, Metric
from eldr_serve.monitoring.ray_metrics import SMALLEST, ray_metrics


class IngressMetrics:
    """Metrics of one ingress replica."""

    def __init__(self) -> None:
        self._ray_metrics = ray_metrics(INGRESS)
        self._seen: dict[tuple[str, str], float] = {}  # totals of counters, by latency and key

    def export(self, own: Mapping[str, Any]) -> None:
        """Export the `ingress` entry of the status."""
        for key, metric in INGRESS_STATUS.items():
            gauge = self._ray_metrics[metric.name]
            value = own[key]
            if key == "stages":
                for stage, times in value.items():
                    for quantile, field in (("0.5", "p50_ms"), ("0.99", "p99_ms")):
                        gauge.set(times[field] / 1000, {"stage": stage, "quantile": quantile})
            elif metric.labels:
                for worker, worker_value in value.items():
                    gauge.set(float(worker_value), {"worker": worker})
            else:
                gauge.set(float(value))
        for worker, experts in own["experts"].items():
            for key, metric in EXPERTS.items():
                self._ray_metrics[metric.name].set(float(experts[key]), {"worker": worker})
        for latency, totals in own["objectives"].items():
            for key, metric in LATENCY_PREDICTION.items():
                self._export_total(metric, latency, key, totals[key])

    def _export_total(self, metric: Metric, latency: str, key: str, value: float) -> None:
        labels = {"latency": latency}
        if metric.kind == GAUGE:
            self._ray_metrics[metric.name].set(float(value), labels)
            return
        increase = value - self._seen.setdefault((latency, key), -SMALLEST)  # this begins the series
        if increase > 0:
            self._seen[latency, key] = value
            self._ray_metrics[metric.name].inc(float(increase), labels)
