"""Write deployments/monitoring: `python -m tools.monitoring --help`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

from eldr_serve.command_errors import run
from eldr_serve.files import write_whole
from tools.monitoring.alerts import rules
from tools.monitoring.dashboards import DASHBOARDS, dashboard

OUT = Path("deployments/monitoring")
RUNBOOK = "docs/runbook.md"
_HEAD = "# Written by `python -m tools.monitoring`; docs/watching.md says how it is used.\n"
# Ray keeps a list of its nodes' metrics ports in this file.
_DISCOVERY = "/tmp/ray/prom_metrics_service_discovery.json"
_PROMETHEUS = {
    "global": {"scrape_interval": "15s", "evaluation_interval": "15s"},
    "rule_files": ["alerts.yaml"],
    "scrape_configs": [{"job_name": "ray", "file_sd_configs": [{"files": [_DISCOVERY]}]}],
}


def files(runbook: str = RUNBOOK) -> dict[str, str]:
    """Return the content of each file by name."""
    return {
        "alerts.yaml": _yaml(rules(runbook)),
        "prometheus.yaml": _yaml(_PROMETHEUS),
        **{f"{name}.json": json.dumps(dashboard(name), indent=1) + "\n" for name in DASHBOARDS},
    }


def _yaml(content: Any) -> str:
    return _HEAD + str(yaml.safe_dump(content, sort_keys=False, width=1000))


def monitoring(
    out: Annotated[Path, typer.Option(help="Folder for the files.")] = OUT,
    runbook: Annotated[str, typer.Option(help="URL of the runbook, for the alerts' links.")] = RUNBOOK,
) -> None:
    """Write Prometheus's configuration and alert rules, and Grafana's dashboards."""
    for name, content in files(runbook).items():
        write_whole(out / name, content)


if __name__ == "__main__":
    run(monitoring)
