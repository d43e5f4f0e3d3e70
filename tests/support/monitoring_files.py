"""The expressions of the shipped alert rules and dashboards, the series that exist, and `promtool`."""

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import yaml

from eldr_serve.metrics import APPLICATION, COUNTER, ENGINE, GAUGE, HISTOGRAM, METRICS, PREFIX

FOLDER = Path(__file__).parents[2] / "deployments/monitoring"
DASHBOARDS = ("service", "placement", "engines")


@dataclass(frozen=True)
class Foreign:
    """A metric of Ray or vLLM on our dashboards. The installed file `source` contains the text `literal`."""

    kind: str
    labels: tuple[str, ...]
    source: str
    literal: str


_ENGINE = ("model_name", "engine", "ReplicaId")
_VLLM = "vllm/v1/metrics/loggers.py"
_NODE = "ray/dashboard/modules/reporter/reporter_agent.py"
FOREIGN = {
    "ray_vllm_num_preemptions_total": Foreign(COUNTER, _ENGINE, _VLLM, 'name="vllm:num_preemptions"'),
    "ray_vllm_num_requests_waiting": Foreign(GAUGE, _ENGINE, _VLLM, 'name="vllm:num_requests_waiting"'),
    "ray_serve_deployment_replica_healthy": Foreign(
        GAUGE,
        ("deployment", "application"),
        "ray/serve/_private/deployment_state.py",
        '"serve_deployment_replica_healthy"',
    ),
    "ray_node_mem_used": Foreign(GAUGE, ("ip",), _NODE, '"node_mem_used"'),
    "ray_node_mem_total": Foreign(GAUGE, ("ip",), _NODE, '"node_mem_total"'),
}
_EVERYWHERE = {"instance", "job", "WorkerId"}  # labels that Prometheus and Ray add to every series


def series() -> dict[str, tuple[str, set[str]]]:
    """Return kind and labels of every series that our expressions may use. A histogram's are counters."""
    labels_by_series = {
        name: (foreign.kind, {*foreign.labels} | _EVERYWHERE) for name, foreign in FOREIGN.items()
    }
    for name, metric in METRICS.items():
        labels = {*metric.labels} | _EVERYWHERE | (set() if name in ENGINE else {APPLICATION})
        if metric.kind == HISTOGRAM:
            labels_by_series |= {f"{PREFIX}{name}{part}": (COUNTER, labels) for part in ("_count", "_sum")}
            labels_by_series[f"{PREFIX}{name}_bucket"] = COUNTER, labels | {"le"}
        else:
            labels_by_series[f"{PREFIX}{name}"] = metric.kind, labels
    return labels_by_series


def promtool(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run Prometheus's checker. AssertionError, with what to install, if there is none."""
    program = shutil.which("promtool") or shutil.which("promtool", path=Path(sys.executable).parent)
    assert program, "no promtool: run `make promtool`, or install Debian's prometheus"
    return subprocess.run([program, *arguments], capture_output=True, text=True, timeout=300, check=False)


def expressions() -> Iterator[tuple[str, str]]:
    """Yield (where, PromQL) of every rule and panel."""
    (group,) = yaml.safe_load((FOLDER / "alerts.yaml").read_text())["groups"]
    yield from ((rule["alert"], rule["expr"]) for rule in group["rules"])
    for name in DASHBOARDS:
        for panel in json.loads((FOLDER / f"{name}.json").read_text())["panels"]:
            for target in panel.get("targets", []):
                yield f"{name}: {panel['title']}", target["expr"]
