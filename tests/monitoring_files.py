"""The Prometheus queries of the shipped alert rules and dashboards."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import yaml

from tools.monitoring.__main__ import OUT
from tools.monitoring.dashboards import DASHBOARDS

FOLDER = Path(__file__).parents[1] / OUT


def expressions() -> Iterator[tuple[str, str]]:
    """Yield (location, PromQL) of the files in the repository."""
    (group,) = yaml.safe_load((FOLDER / "alerts.yaml").read_text())["groups"]
    yield from ((rule["alert"], rule["expr"]) for rule in group["rules"])
    for name in DASHBOARDS:
        for panel in json.loads((FOLDER / f"{name}.json").read_text())["panels"]:
            for target in panel.get("targets", []):
                yield f"{name}: {panel['title']}", target["expr"]
