"""A benchmark by replay, from the prompts to the result, on the demo model with wider experts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scripts import ROOT

from benchmarks.harness.engine_pool import EnginePool
from benchmarks.harness.replay import widened
from benchmarks.harness.replay_engine import ENGINE_ENV, Arrival
from offline.simulation.calibration import fit_steps
from tools.cli import BadInput

SHORT = 100  # characters


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the capture and the widened model are kept for the next test."""
    return tmp_path_factory.mktemp("work")


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's prompts, cut short: a replay begins with the prefill of each."""
    folder = tmp_path_factory.mktemp("prompts")
    for file in (ROOT / "demo_model" / "prompts").glob("*.jsonl"):
        records = map(json.loads, file.read_text().splitlines())
        lines = [json.dumps(record | {"prompt": record["prompt"][:SHORT]}) for record in records]
        (folder / file.name).write_text("\n".join(lines))
    return folder


def replayed(name: str, prompts: Path, work: Path, out: Path, **more: object) -> dict[str, Any]:
    options = {
        "prompts": prompts,
        "workers": 2,
        "groups": "all",
        "per-worker": 4,
        "batch": 2,
        "output-tokens": 8,
        "intermediate": 1024,
        "requests": 24,
        "work": work,
        "out": out,
    } | more
    arguments = [f"--{name}={value}" for name, value in options.items()]
    done = subprocess.run(
        [sys.executable, "-m", *f"benchmarks.{name}".split(), *arguments],
        capture_output=True, text=True, timeout=600, check=False, cwd=ROOT, env=os.environ | ENGINE_ENV,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    result: dict[str, Any] = json.loads(out.read_text())
    return result


def test_a_replay_measures_every_request_of_every_arm(prompts: Path, work: Path, tmp_path: Path) -> None:
    result = replayed("replays band_width", prompts, work, tmp_path / "band.json", engines=2)
    assert result["inputs"]["step_cost"]["per_expert_s"] > 0
    arms = [row["arm"] for row in result["rows"]]
    assert arms == ["round-robin", "band 0.0", "band 0.1", "band 0.2", "band 0.3"]
    for row in result["rows"]:
        assert 0 < row["tpot_p50_ms"] <= row["tpot_p99_ms"]
        assert row["p50_low_pct"] <= row["p50_change_pct"] <= row["p50_high_pct"]
        assert 4 <= row["active_experts"] <= 4 * row["batch_size"]
    assert (tmp_path / "band.png").stat().st_size > 5000


def test_an_engine_that_dies_is_said_in_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="engine died"), EnginePool(tmp_path / "no model", 1) as pool:
        pool.probe_s()


def test_the_clock_runs_slower_as_the_core_does(work: Path) -> None:
    arrivals = [Arrival(str(n), 0.0, list(range(10, 43)), 20, n) for n in range(4)]
    with EnginePool(widened(1024, work), 1) as pool:
        assert pool.probe_s() > 0
        (as_now, steps), (slower, _) = (pool.replay(arrivals, probe_s).result() for probe_s in (1.0, 1e-3))
    assert set(as_now) == set(slower) == {"0", "1", "2", "3"}
    assert all(len(times) == 20 and (np.diff(times) > 0).all() for times in as_now.values())
    # A core that is a thousand times slower for the one than for the other: a step is 1000**0.75 times.
    assert 40 < as_now["0"][-1] / slower["0"][-1] < 800
    assert len(steps.slowdown) == len(steps.seconds) >= 19


def test_the_engine_samples_the_captured_text_again(prompts: Path, work: Path, tmp_path: Path) -> None:
    """So that simulator and engine have the same routes, and differ in time alone."""
    steps = tmp_path / "steps.jsonl"
    # So many at once that a slow spell of the machine hardly changes who shares a step with whom.
    options = {"steps-out": steps, "batch": 100, "per-worker": 6, "repeats": 2}
    result = replayed("simulator_validation", prompts, work, tmp_path / "validation.json", **options)
    assert len(result["rows"]) == 8
    for row in result["rows"]:
        # Other mates in a step now and then, as its time is another; the text and its experts are the same.
        assert row["simulated_active_experts"] == pytest.approx(row["active_experts"], rel=0.15)
        assert row["regret_mean_us"] >= 0
    assert fit_steps(steps).steps == len(steps.read_text().splitlines()) > 100
