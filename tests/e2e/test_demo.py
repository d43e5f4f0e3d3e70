"""Output and files of the README's first command, on real engines."""

import json
import re

import pytest

from tests.e2e.service import Demo
from tests.support.browser import render

POLICIES = ["shortest-queue", "marginal-cost", "locality-band"]
FIRST = re.compile(
    r"marginal-cost reads \d+\.\d % (fewer|more) experts per step than shortest-queue \[.*?\]"
    r".*?; its steps take \d+\.\d % (less|more) CPU time per token \[.*?\]"
)


def test_the_demo_prints_its_progress_and_the_location_of_its_results(demo: Demo) -> None:
    output = demo.log.read_text().replace("\n", "")
    assert "Decode 0 of 2" in output
    for written in ("report.html", "demo.json"):
        assert str(demo.out / written) in output
    # The effects of placement are printed before the clients' figures and the table.
    answer = FIRST.search(output)
    assert answer is not None, output
    assert "are equal under all 3 policies" in output
    assert answer.start() < output.index("TPOT p50") < output.index("figure")


def test_the_demo_writes_its_figures(demo: Demo) -> None:
    result = json.loads((demo.out / "demo.json").read_text())
    assert [row["policy"] for row in result["rows"]] == POLICIES
    assert "are equal under all 3 policies" in result["notes"]
    for row in result["rows"]:
        assert row["requests"] > 0
        assert row["failures"] == 0
        assert 4 <= row["active_experts"] <= 64
        assert 1 <= row["batch_size"] <= result["inputs"]["in_flight"]
        assert row["experts_per_token"] == pytest.approx(row["active_experts"] / row["batch_size"])
        assert row["engine_ms_per_token"] > 0
        assert 0 < row["tpot_p50_ms"] <= row["tpot_p99_ms"]
    baseline, *ours = result["rows"]
    assert baseline["batch_size"] > 4  # a closed loop: placement can matter
    for row in ours:
        for key in ("active_experts", "engine_ms_per_token"):
            low, change, high = (row[f"{key}_change_pct{end}"] for end in ("_low", "", "_high"))
            assert low < change < high
            assert row[f"{key}_baseline"] == "shortest-queue"
    assert ours[1]["most_similar_worker_share"] > 0.5  # the table was live


async def test_the_demos_report_opens_in_a_browser(demo: Demo) -> None:
    dom, widths, _ = await render(demo.out / "report.html")
    assert "<title>eldr-serve demo</title>" in dom
    assert all(policy in dom for policy in POLICIES)
    answer = FIRST.search(dom)
    assert answer is not None
    assert answer.start() < dom.index("<img") < dom.index("TPOT p50") < dom.index("<table")
    assert len(widths) == 4
    assert min(widths) > 300
