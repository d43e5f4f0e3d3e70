"""Alert rules and dashboards: valid PromQL over existing metrics, tested alerts, and their runbook."""

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from eldr_serve.metrics import APPLICATION, COUNTER
from tests.support.monitoring_files import DASHBOARDS, FOLDER, FOREIGN, expressions, promtool, series
from tests.support.shipped import ROOT

ALERT_TESTS = ROOT / "tests/unit/monitoring/alerts_test.yaml"
_GROUPED = r"\b(?:by|without|on|ignoring) \(([^)]*)\)"


def _rules() -> list[dict[str, Any]]:
    (group,) = yaml.safe_load((FOLDER / "alerts.yaml").read_text())["groups"]
    return list(group["rules"])


def _panels(name: str) -> list[dict[str, Any]]:
    return list(json.loads((FOLDER / f"{name}.json").read_text())["panels"])


def test_every_rule_has_severity_summary_and_runbook_link() -> None:
    for rule in _rules():
        assert rule["labels"]["severity"] in ("critical", "warning", "info")
        assert rule["annotations"]["summary"].endswith(".")
        assert rule["annotations"]["runbook_url"] == (
            "{{ $externalLabels.runbook }}#" + rule["alert"].lower()
        )


def test_prometheus_accepts_its_configuration_and_the_rules() -> None:
    done = promtool("check", "config", FOLDER / "prometheus.yaml")
    assert done.returncode == 0, done.stderr
    assert f"{len(_rules())} rules found" in done.stdout


def test_each_alert_fires_in_its_scenario_and_in_no_other() -> None:
    done = promtool("test", "rules", ALERT_TESTS)
    assert done.returncode == 0, done.stdout + done.stderr
    tested = set(re.findall(r'alertname="(\w+)"', ALERT_TESTS.read_text()))
    assert tested == {rule["alert"] for rule in _rules()}


def test_every_expression_is_valid_promql_over_existing_series(tmp_path: Path) -> None:
    all_expressions = list(expressions())
    assert len(all_expressions) > 80
    assert _promtool_errors(tmp_path, *(expr for _, expr in all_expressions)) == ""
    assert not {where: problems for where, expr in all_expressions if (problems := list(_problems(expr)))}


def test_invalid_promql_is_refused(tmp_path: Path) -> None:
    wrong = [
        "sum(rate(ray_eldr_placed_total[5m])",
        "sum(ray_eldr_leases))",
        "ray_eldr_leases ? 1",
        "ray_eldr_leases > 5x",
        "average(ray_eldr_leases)",
        "rate(ray_eldr_placed_total)",
        "max(ray_eldr_placed_total[5m])",
        "5m > ray_eldr_leases",
    ]
    assert _promtool_errors(tmp_path, *wrong).count("could not parse expression") == len(wrong)


@pytest.mark.parametrize(
    ("expr", "words"),
    [
        ("eldr_leases", "no series eldr_leases"),
        ("sum(ray_eldr_lease) > bool 1.5e-3", "no series ray_eldr_lease"),
        ("rate(ray_eldr_placed[5m])", "no series ray_eldr_placed"),
        ("rate(ray_eldr_tpot_seconds[5m])", "no series ray_eldr_tpot_seconds"),
        ("rate(ray_eldr_leases[5m])", "ray_eldr_leases is a gauge"),
        ('rate(ray_eldr_leases{policy="x"}[5m])', "ray_eldr_leases is a gauge"),
        ("ray_eldr_placed_total > 5", "ray_eldr_placed_total is a counter"),
        ('ray_eldr_leases{polcy="x"}', "no series of it has a label polcy"),
        ("sum by (worker) (ray_eldr_leases)", "no series of it has a label worker"),
        ("sum by (le) (rate(ray_eldr_tpot_seconds_count[5m]))", "no series of it has a label le"),
        ("1 > bool 0", "it names no series"),
    ],
)
def test_wrong_series_of_an_expression_are_reported(expr: str, words: str) -> None:
    (problem,) = _problems(expr)
    assert words in problem


def test_a_valid_expression_is_accepted(tmp_path: Path) -> None:
    right = [
        "ray_eldr_leases",
        'max by (policy) (ray_eldr_leases{policy=~"a|b", instance!="x"} offset 5m) > bool 1.5e-3',
        "histogram_quantile(0.99, sum by (le) (rate(ray_eldr_tpot_seconds_bucket[5m])))",
        'sum by (reason) (increase(ray_eldr_placed_by_reason_total{reason="x"}[1h])) > 0',
        "absent(ray_eldr_leases) and on (policy) ray_eldr_leases",
    ]
    assert _promtool_errors(tmp_path, *right) == ""
    assert not [problem for expr in right for problem in _problems(expr)]


def _promtool_errors(folder: Path, *exprs: str) -> str:
    """Return what promtool says against the expressions as recording rules, or nothing if it accepts them."""
    rules = [{"record": f"e{number}", "expr": expr} for number, expr in enumerate(exprs)]
    file = folder / "rules.yaml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "expressions", "rules": rules}]}))
    done = promtool("check", "rules", file)
    return "" if done.returncode == 0 else done.stdout + done.stderr


def _problems(expr: str) -> Iterator[str]:
    """Yield what is wrong with the series, labels and ranges of an expression that promtool accepts."""
    series_by_name = series()
    plain = re.sub(r'"[^"]*"', "", expr)
    labels = {name for text in re.findall(_GROUPED, plain) for name in re.findall(r"\w+", text)}
    labels |= {name for text in re.findall(r"\{([^}]*)\}", plain) for name in re.findall(r"\w+", text)}
    ranged = set(re.findall(r"([\w:]+)(?:\{[^}]*\})?\[", plain))
    bare = re.sub(r"\{[^}]*\}|\[[^]]*\]", "", re.sub(_GROUPED, "", plain))
    bare = re.sub(r"\b(?:and|or|unless|bool|offset \d+\w)\b|[\w.]+ *\(", " ", bare)
    used = set(re.findall(r"\b[a-zA-Z_:][\w:]*", bare))
    if not used:
        yield "it names no series"
    yield from (f"there is no series {name}" for name in sorted(used - series_by_name.keys()))
    for name in sorted(used & series_by_name.keys()):
        kind, _ = series_by_name[name]
        if (kind == COUNTER) != (name in ranged):
            yield f"{name} is a {kind}: rate and increase are for counters, and counters for them"
    has = {label for name in used & series_by_name.keys() for label in series_by_name[name][1]}
    yield from (f"no series of it has a label {name}" for name in sorted(labels - has))


def test_metrics_of_ray_and_vllm_occur_in_their_installed_files() -> None:
    for name, foreign in FOREIGN.items():
        (file,) = {Path(p) / foreign.source for p in sys.path if (Path(p) / foreign.source).is_file()}
        assert foreign.literal in file.read_text(), name
        stem = re.sub(r".*[:\"](\w+)\"$", r"\1", foreign.literal)
        assert name in {f"{prefix}{stem}{end}" for prefix in ("ray_", "ray_vllm_") for end in ("", "_total")}
    texts = " ".join(expr for _, expr in expressions())
    assert not [name for name in FOREIGN if name not in texts]


def _sections() -> dict[str, str]:
    parts = re.split(r"^### ", (ROOT / "docs/runbook.md").read_text(), flags=re.MULTILINE)[1:]
    return {part.partition("\n")[0]: re.split(r"^## ", part, flags=re.MULTILINE)[0] for part in parts}


def test_alerts_and_runbook_sections_correspond() -> None:
    sections = {name: text for name, text in _sections().items() if name.startswith("Eldr")}
    assert sorted(sections) == sorted(rule["alert"] for rule in _rules())
    for name, text in sections.items():
        for part in ("**Means**", "**Clients**", "**Look**", "**Do**"):
            assert part in text, f"{name}: {part}"


@pytest.mark.parametrize("name", DASHBOARDS)
def test_panels_of_a_dashboard_have_title_unit_and_expressions(name: str) -> None:
    document = json.loads((FOLDER / f"{name}.json").read_text())
    variable, application = document["templating"]["list"]
    assert (application["name"], application["includeAll"]) == ("application", True)
    assert document["uid"] == f"eldr-{name}"
    for panel in _panels(name):
        assert panel["title"]
        if panel["type"] == "row":
            continue
        assert panel["fieldConfig"]["defaults"]["unit"], panel["title"]
        assert panel["targets"], panel["title"]
        assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])
        for part in (panel, *panel["targets"]):
            assert part["datasource"] == {"type": "prometheus", "uid": f"${{{variable['name']}}}"}
        assert all(target["expr"] and target["legendFormat"] for target in panel["targets"])


@pytest.mark.parametrize("name", DASHBOARDS)
def test_panels_show_the_selected_application(name: str) -> None:
    series_by_name = series()
    exprs = [target["expr"] for panel in _panels(name) for target in panel.get("targets", [])]
    used = [match for expr in exprs for match in re.findall(r"\b(ray_eldr_\w+)(\{[^},]*)?", expr)]
    assert len(used) > 5
    for metric, selector in used:
        has_label = APPLICATION in series_by_name[metric][1]
        assert (selector == '{application=~"$application"') == has_label, metric


def test_alerts_are_grouped_by_application() -> None:
    for rule in _rules():
        groups = re.findall(r"\b(?:sum|min|max)(?: by \((\w+)[^)]*\))? *\(", rule["expr"])
        assert set(groups) == {APPLICATION} or rule["alert"] == "EldrNoMetrics", rule["expr"]


@pytest.mark.parametrize("name", DASHBOARDS)
def test_panels_of_a_dashboard_do_not_overlap(name: str) -> None:
    occupied: set[tuple[int, int]] = set()
    numbers = []
    for panel in _panels(name):
        grid: dict[str, Any] = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(grid["x"], grid["x"] + grid["w"])
            for y in range(grid["y"], grid["y"] + grid["h"])
        }
        assert not occupied & cells
        assert all(x < 24 for x, _ in cells)
        occupied |= cells
        numbers.append(panel["id"])
    assert len(set(numbers)) == len(numbers)
