"""A benchmark by replay, from the prompts to the result, on the demo model with wider experts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from scripts import ROOT

from benchmarks.rig.replay_engine import ENGINE_ENV


def test_a_replay_measures_every_request_of_every_arm(tmp_path: Path) -> None:
    options = {
        "prompts": ROOT / "demo_model" / "prompts",
        "workers": 2,
        "groups": "all",
        "per-worker": 4,
        "batch": 2,
        "output-tokens": 8,
        "intermediate": 512,
        "requests": 48,
        "work": tmp_path,
        "out": tmp_path / "band.json",
    }
    arguments = [f"--{name}={value}" for name, value in options.items()]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.band_width", *arguments],
        capture_output=True, text=True, timeout=600, check=False, cwd=ROOT, env=os.environ | ENGINE_ENV,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads((tmp_path / "band.json").read_text())
    assert result["inputs"]["step_cost"]["per_expert_s"] > 0
    arms = [row["arm"] for row in result["rows"]]
    assert arms == ["round-robin", "band 0.0", "band 0.1", "band 0.2", "band 0.3"]
    for row in result["rows"]:
        assert 0 < row["tpot_p50_ms"] <= row["tpot_p99_ms"]
        assert row["p50_low_pct"] <= row["p50_change_pct"] <= row["p50_high_pct"]
        assert 4 <= row["active_experts"] <= 4 * row["batch_size"]
    assert (tmp_path / "band.png").stat().st_size > 5000
