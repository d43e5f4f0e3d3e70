"""The README's first command, small: from nothing to its report, on real engines."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from browser import rendered

ROOT = Path(__file__).parents[2]
POLICIES = ["shortest-queue", "locality-band", "marginal-cost"]


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a demo with five seconds of load under each policy."""
    folder = tmp_path_factory.mktemp("demo")
    options = {"seconds": 5, "rounds": 1, "calibration": 20, "intermediate": 64, "port": 8451, "out": folder}
    done = subprocess.run(
        [sys.executable, "-m", "offline.demo", *(f"--{name}={value}" for name, value in options.items())],
        capture_output=True, text=True, cwd=ROOT, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    for written in ("report.html", "demo.json"):
        assert str(folder / written) in done.stdout.replace("\n", "")
    assert "Decode 0 of 2" in done.stdout  # it says what it waits for
    return folder


def test_the_demo_writes_its_figures(out: Path) -> None:
    result = json.loads((out / "demo.json").read_text())
    assert [row["policy"] for row in result["rows"]] == POLICIES
    assert len({row["requests"] for row in result["rows"]}) == 1
    for row in result["rows"]:
        assert row["requests"] > 0
        assert row["failures"] == 0
        assert 4 <= row["active_experts"] <= 64
        assert 1 <= row["batch_size"] <= 32
        assert 0 < row["tpot_p50_ms"] <= row["tpot_p99_ms"]
    assert result["rows"][1]["best_worker_share"] > 0.5  # the table was live


def test_the_demos_report_opens_in_a_browser(out: Path, tmp_path: Path) -> None:
    seen, widths = rendered(out / "report.html", tmp_path)
    assert "<title>eldr-serve demo</title>" in seen
    assert all(policy in seen for policy in POLICIES)
    assert len(widths) == 3
    assert min(widths) > 300
