"""Definitions of all metrics; the code creates metrics from these tables, and the reference lists them.

A metric's name, unit and labels are defined here and nowhere else. `eldr_serve.monitoring` creates Ray's
objects from the definitions, and measures the event loop of every process. Each package that owns a state
exports it (`metrics_export.py` in `ingress` and `router`, `engine/vllm/stats.py`). So a new metric needs a
definition here, and an update beside the state that it shows.

Ray exports each name with the prefix `ray_`. Following Prometheus' conventions, counters end in `_total`, and
units are seconds, tokens, requests or ratios.
"""

from eldr_serve.metrics.counters import (
    COUNTERS,
    COUNTERS_BY_NAME,
    IngressEvent,
    NamedCounter,
    RouterEvent,
)
from eldr_serve.metrics.definition import APPLICATION, COUNTER, GAUGE, HISTOGRAM, PREFIX, Metric
from eldr_serve.metrics.engine import ENGINE, REPLICA
from eldr_serve.metrics.event_loop import LOOP, PROCESS, STALL_S
from eldr_serve.metrics.ingress import EXPERTS, INGRESS, INGRESS_STATUS, LATENCY_PREDICTION
from eldr_serve.metrics.router import ROUTER

__all__ = [
    "APPLICATION",
    "COUNTER",
    "COUNTERS",
    "COUNTERS_BY_NAME",
    "ENGINE",
    "EXPERTS",
    "GAUGE",
    "HISTOGRAM",
    "INGRESS",
    "INGRESS_STATUS",
    "LATENCY_PREDICTION",
    "LOOP",
    "METRICS",
    "PREFIX",
    "PROCESS",
    "REPLICA",
    "ROUTER",
    "STALL_S",
    "IngressEvent",
    "Metric",
    "NamedCounter",
    "RouterEvent",
]

METRICS = ROUTER | INGRESS | PROCESS | REPLICA | ENGINE
