"""Definitions of all metrics; the code creates metrics from these tables, and the reference lists them.

Five places have a part in metrics, by this rule: a name, its unit and its labels are defined here and nowhere
else; `eldr_serve.monitoring` creates Ray's objects from the definitions and measures what every process has,
its event loop; each package that owns a state exports it (`ingress/metrics.py`, `router/metrics.py`,
`engine/vllm/stats.py`). So a new metric is a definition here and an update beside the state that it shows.

Ray exports each name with the prefix `ray_`. Following Prometheus' conventions, counters end in `_total`, and
units are seconds, tokens, requests or ratios.
"""

from eldr_serve.metrics.definition import APPLICATION, COUNTER, GAUGE, HISTOGRAM, PREFIX, Metric
from eldr_serve.metrics.engine import ENGINE, REPLICA
from eldr_serve.metrics.event_loop import LOOP, PROCESS, STALL_S
from eldr_serve.metrics.ingress import EXPERTS, INGRESS, OBJECTIVES, OWN
from eldr_serve.metrics.router import COUNTED, NAMED, ROUTER

__all__ = [
    "APPLICATION",
    "COUNTED",
    "COUNTER",
    "ENGINE",
    "EXPERTS",
    "GAUGE",
    "HISTOGRAM",
    "INGRESS",
    "LOOP",
    "METRICS",
    "NAMED",
    "OBJECTIVES",
    "OWN",
    "PREFIX",
    "PROCESS",
    "REPLICA",
    "ROUTER",
    "STALL_S",
    "Metric",
]

METRICS = ROUTER | INGRESS | PROCESS | REPLICA | ENGINE
