"""What the README's first command says and writes, on real engines."""

from __future__ import annotations

import json
from pathlib import Path

from browser import rendered
from service import Demo

POLICIES = ["shortest-queue", "locality-band", "marginal-cost"]


def test_the_demo_says_what_it_waits_for_and_where_its_results_are(demo: Demo) -> None:
    said = demo.said.read_text().replace("\n", "")
    assert "Decode 0 of 2" in said
    for written in ("report.html", "demo.json"):
        assert str(demo.out / written) in said


def test_the_demo_writes_its_figures(demo: Demo) -> None:
    result = json.loads((demo.out / "demo.json").read_text())
    assert [row["policy"] for row in result["rows"]] == POLICIES
    assert len({row["requests"] for row in result["rows"]}) == 1
    for row in result["rows"]:
        assert row["requests"] > 0
        assert row["failures"] == 0
        assert 4 <= row["active_experts"] <= 64
        assert 1 <= row["batch_size"] <= 32
        assert 0 < row["tpot_p50_ms"] <= row["tpot_p99_ms"]
    assert result["rows"][1]["best_worker_share"] > 0.5  # the table was live


def test_the_demos_report_opens_in_a_browser(demo: Demo, tmp_path: Path) -> None:
    seen, widths = rendered(demo.out / "report.html", tmp_path)
    assert "<title>eldr-serve demo</title>" in seen
    assert all(policy in seen for policy in POLICIES)
    assert len(widths) == 3
    assert min(widths) > 300
