"""Ray's metrics, made from their definitions in `eldr_serve.metrics`, with the label `application`."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import ray
from ray.util.metrics import Counter, Gauge, Histogram

from eldr_serve.metrics import APPLICATION, COUNTER, GAUGE, Metric

PERIOD_S = 1.0  # export interval; Ray drops a gauge that is not set for two of its own reports
# Ray creates a counter's series at its first increment, and Prometheus sees no increase in a first sample.
# Therefore, each series begins with the smallest increment that Ray accepts, which the next one absorbs.
SMALLEST = sys.float_info.min


def ray_metrics(metrics: Mapping[str, Metric]) -> dict[str, Any]:
    """Return Ray's metric objects by name; each adds the application of this process to its labels."""
    application = {APPLICATION: _application()}
    return {name: _ray_metric(metric).set_default_tags(application) for name, metric in metrics.items()}


class StatusMetrics:
    """Ray's metrics whose values come from a status, in which counters are totals.

    Attributes:
        by_name: Ray's metric objects by name.
    """

    def __init__(self, metrics: Mapping[str, Metric]) -> None:
        self.by_name = ray_metrics(metrics)
        self._totals: dict[tuple[str, ...], float] = {}  # totals of counters, by name and values of labels

    def export(self, metric: Metric, value: float, **labels: str) -> None:
        """Set a gauge to the value, or increase a counter to it."""
        if metric.kind == GAUGE:
            self.by_name[metric.name].set(float(value), labels)
            return
        key = (metric.name, *labels.values())
        increase = value - self._totals.setdefault(key, -SMALLEST)  # this begins the series
        if increase > 0:
            self._totals[key] = value
            self.by_name[metric.name].inc(float(increase), labels)


def _ray_metric(metric: Metric) -> Counter | Gauge | Histogram:
    about, labels = f"{metric.about}, {metric.unit}", (APPLICATION, *metric.labels)
    if metric.kind == COUNTER:
        return Counter(metric.name, about, labels)
    if metric.kind == GAUGE:
        return Gauge(metric.name, about, labels)
    return Histogram(metric.name, about, list(metric.bounds), labels)


def _application() -> str:
    """Return the name of the Serve application of this process, an actor of Ray; empty in other processes.

    Serve does not know the application of a DecodeRouter, which is no replica; the actor's name contains it.
    """
    if not ray.is_initialized():
        return ""
    kind, _, application = (ray.get_runtime_context().get_actor_name() or "").partition(":")
    if kind == "decode-router":
        return application
    # Serve is imported only here, since a router, which needs nothing else of Serve, has returned above.
    from ray import serve
    from ray.serve.exceptions import RayServeException

    try:
        return str(serve.get_replica_context().app_name)
    except RayServeException:
        return ""
