"""Alert rules and dashboards: as the command writes them, of metrics that there are, each with its page."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from monitoring_files import FOLDER, expressions
from shipped import ROOT

from tools.monitoring.__main__ import files, monitoring
from tools.monitoring.alerts import ALERTS
from tools.monitoring.dashboards import DASHBOARDS, dashboard
from tools.monitoring.promql import FOREIGN, problems


def test_the_repository_has_what_the_command_writes(tmp_path: Path) -> None:
    monitoring(out=tmp_path)
    written = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert written == {path.name: path.read_text() for path in FOLDER.iterdir()}
    assert len(written) == 2 + len(DASHBOARDS)


def test_an_address_of_the_runbook_is_in_every_rule() -> None:
    (group,) = yaml.safe_load(files("https://docs.example/runbook.html")["alerts.yaml"])["groups"]
    for rule in group["rules"]:
        url = rule["annotations"]["runbook_url"]
        assert url == f"https://docs.example/runbook.html#{rule['alert'].lower()}"


def test_every_expression_is_of_metrics_that_there_are_and_uses_them_well() -> None:
    found = list(expressions())
    assert len(found) > 80
    assert not {(where, expr): problems(expr) for where, expr in found if problems(expr)}


@pytest.mark.parametrize(
    ("expr", "said"),
    [
        ("sum(rate(ray_eldr_placed_total[5m])", "( is not closed"),
        ("sum(ray_eldr_leases))", ") closes nothing"),
        ("sum(ray_eldr_leases] )", "] closes nothing"),
        ("ray_eldr_leases ? 1", "this is no PromQL: ? 1"),
        ("ray_eldr_leases > 5x", "this is no PromQL: 5x"),
        ("average(ray_eldr_leases)", "average is no function"),
        ("eldr_leases", "there is no metric eldr_leases"),
        ("ray_eldr_lease", "there is no metric ray_eldr_lease"),
        ("rate(ray_eldr_placed[5m])", "there is no metric ray_eldr_placed"),
        ("rate(ray_eldr_tpot_seconds[5m])", "there is no metric ray_eldr_tpot_seconds"),
        ("rate(ray_eldr_leases[5m])", "rate and increase are for counters"),
        ("ray_eldr_placed_total > 5", "rate and increase are for counters"),
        ("rate(ray_eldr_placed_total)", "needs a range"),
        ("max(ray_eldr_placed_total[5m])", "needs a range within rate"),
        ("5m > ray_eldr_leases", "5m is no range"),
        ('ray_eldr_leases{polcy="x"}', "ray_eldr_leases has no label polcy"),
        ("sum by (worker) (ray_eldr_leases)", "has a label worker"),
        ("sum by (le) (rate(ray_eldr_tpot_seconds_count[5m]))", "has a label le"),
        ("1 > 0", "it names no metric"),
    ],
)
def test_what_is_wrong_with_an_expression_is_said(expr: str, said: str) -> None:
    assert said in " ".join(problems(expr))


@pytest.mark.parametrize(
    "expr",
    [
        "ray_eldr_leases",
        'max by (policy) (ray_eldr_leases{policy=~"a|b", instance!="x"} offset 5m) > bool 1.5e-3',
        "histogram_quantile(0.99, sum by (le) (rate(ray_eldr_tpot_seconds_bucket[5m])))",
        'sum by (reason) (increase(ray_eldr_placed_by_reason_total{reason="x"}[1h])) > 0',
        "absent(ray_eldr_placed_total)",
    ],
)
def test_what_is_right_passes(expr: str) -> None:
    assert not problems(expr)


def test_what_ray_and_vllm_export_is_in_their_installed_files() -> None:
    for foreign in FOREIGN.values():
        (folder,) = {Path(p) / foreign.source for p in sys.path if (Path(p) / foreign.source).is_file()}
        text = folder.read_text()
        assert foreign.literal in text, foreign.name
        stem = re.sub(r".*[:\"](\w+)\"$", r"\1", foreign.literal)
        assert foreign.name in {
            f"ray_{stem}",
            f"ray_{stem}_total",
            f"ray_vllm_{stem}",
            f"ray_vllm_{stem}_total",
        }
    shown = " ".join(expr for _, expr in expressions())
    assert not [name for name in FOREIGN if name not in shown]


def _sections() -> dict[str, str]:
    parts = re.split(r"^### ", (ROOT / "docs/runbook.md").read_text(), flags=re.MULTILINE)[1:]
    return {part.partition("\n")[0]: re.split(r"^## ", part, flags=re.MULTILINE)[0] for part in parts}


def test_each_alert_has_its_section_of_the_runbook_and_each_section_its_alert() -> None:
    sections = {name: text for name, text in _sections().items() if name.startswith("Eldr")}
    assert sorted(sections) == sorted(alert.name for alert in ALERTS)
    for alert in ALERTS:
        assert len({alert.name for alert in ALERTS}) == len(ALERTS)
        for part in ("**Means**", "**Clients**", "**Look**", "**Do**"):
            assert part in sections[alert.name], f"{alert.name}: {part}"


@pytest.mark.parametrize("name", DASHBOARDS)
def test_panels_of_a_dashboard_do_not_overlap(name: str) -> None:
    taken: set[tuple[int, int]] = set()
    numbers = []
    for panel in dashboard(name)["panels"]:
        grid: dict[str, Any] = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(grid["x"], grid["x"] + grid["w"])
            for y in range(grid["y"], grid["y"] + grid["h"])
        }
        assert not taken & cells
        assert all(x < 24 for x, _ in cells)
        taken |= cells
        numbers.append(panel["id"])
    assert len(set(numbers)) == len(numbers)
