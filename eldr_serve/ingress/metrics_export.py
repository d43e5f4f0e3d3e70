"""Ray metrics of one ingress replica, from its status and its stage latencies."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from eldr_serve.metrics import EXPERTS, HISTOGRAM, INGRESS, INGRESS_STATUS, LATENCY_PREDICTION
from eldr_serve.monitoring.ray_metrics import StatusMetrics


class IngressMetrics:
    """Metrics of one ingress replica."""

    def __init__(self) -> None:
        self._metrics = StatusMetrics(INGRESS)

    def observe_stage(self, stage: str, seconds: float) -> None:
        """Record the duration of a stage of one request."""
        self._metrics.by_name[INGRESS_STATUS["stages"].name].observe(seconds, {"stage": stage})

    def export(self, own: Mapping[str, Any]) -> None:
        """Export the `ingress` entry of the status, except the stages."""
        for key, metric in INGRESS_STATUS.items():
            value = own[key]
            if metric.kind == HISTOGRAM:
                continue
            if metric.labels:
                for worker, worker_value in value.items():
                    self._metrics.export(metric, worker_value, worker=worker)
            else:
                self._metrics.export(metric, value)
        for worker, experts in own["experts"].items():
            for key, metric in EXPERTS.items():
                self._metrics.export(metric, experts[key], worker=worker)
        for latency, totals in own["objectives"].items():
            for key, metric in LATENCY_PREDICTION.items():
                self._metrics.export(metric, totals[key], latency=latency)
