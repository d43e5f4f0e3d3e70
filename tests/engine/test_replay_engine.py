"""A replay benchmark from the prompts to the result, on the demo model with wider experts."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest

from benchmarks.lib.engine_pool import EnginePool
from benchmarks.lib.replay import command as replay_command
from benchmarks.lib.replay.engine import ENGINE_ENV, ReplayArrival
from benchmarks.lib.replay.schedule import widen_model
from benchmarks.papers.simulator_validation import simulator_validation
from eldr_serve.commands.run import run
from eldr_serve.errors import ServiceFailedError
from offline.simulation.calibration import fit_step_cost
from tests.engine.scripts import ROOT
from tests.support.processes import output

pytestmark = pytest.mark.benchmarks
SHORT = 100  # characters
WIDE = 1024  # neurons per expert
# The capture also runs its engine in its own process, and so imports vLLM once.
IN_PROCESS = ENGINE_ENV | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder that keeps the capture and the widened model for the next test."""
    return tmp_path_factory.mktemp("work")


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write shortened demo prompts: a replay begins with the prefill of each."""
    folder = tmp_path_factory.mktemp("prompts")
    for file in (ROOT / "examples/demo_model" / "prompts").glob("*.jsonl"):
        records = map(json.loads, file.read_text().splitlines())
        lines = [json.dumps(record | {"prompt": record["prompt"][:SHORT]}) for record in records]
        (folder / file.name).write_text("\n".join(lines))
    return folder


@pytest.fixture(scope="module")
def pool(work: Path) -> Iterator[EnginePool]:
    """Yield a pool of one engine with the widened model."""
    with EnginePool(widen_model(WIDE, work), 1) as pool:
        yield pool
        for process in pool._pool._processes.values():
            process.kill()  # a regular engine exit takes 5 s; the first test waits for two


def in_process(module: str, *words: str) -> None:
    """Run a benchmark whose engines share its process, to its successful end."""
    output(sys.executable, "-m", module, *words, env=os.environ | IN_PROCESS, timeout_s=600)


def arguments(prompts: Path, work: Path, out: Path, **more: object) -> list[str]:
    options = {
        "prompts": prompts,
        "workers": 2,
        "groups": "all",
        "per-worker": 4,
        "batch": 2,
        "output-tokens": 8,
        "intermediate": WIDE,
        "requests": 24,
        "work": work,
        "out": out,
    } | more
    return [f"--{name}={value}" for name, value in options.items()]


def test_a_replay_measures_every_request_of_every_arm(prompts: Path, work: Path, tmp_path: Path) -> None:
    out = tmp_path / "band.json"
    in_process("benchmarks.engine.replays", "band_width", *arguments(prompts, work, out, engines=2))
    result = json.loads(out.read_text())
    assert result["inputs"]["step_cost"]["per_expert_s"] > 0
    arms = [row["arm"] for row in result["rows"]]
    assert arms == ["round-robin", "band 0.0", "band 0.1", "band 0.2", "band 0.3"]
    for row in result["rows"]:
        assert 0 < row["tpot_p50_ms"] <= row["tpot_p99_ms"]
        assert row["p50_low_pct"] <= row["p50_change_pct"] <= row["p50_high_pct"]
        assert 4 <= row["active_experts"] <= 4 * row["batch_size"]
    assert (tmp_path / "band.png").stat().st_size > 5000


def test_a_dead_engine_is_reported_in_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch.py").write_text("import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    monkeypatch.syspath_prepend(tmp_path)  # spawned processes inherit it
    with (
        pytest.raises(ServiceFailedError, match="engine died"),
        EnginePool(tmp_path / "no model", 1) as pool,
    ):
        pool.probe_s()


def test_the_clock_slows_down_with_the_core(pool: EnginePool) -> None:
    arrivals = [ReplayArrival(str(n), 0.0, list(range(10, 43)), 20, n) for n in range(4)]
    assert pool.probe_s() > 0
    (as_now, steps), (slower, _) = (pool.replay(arrivals, probe_s).result() for probe_s in (1.0, 1e-3))
    assert set(as_now) == set(slower) == {"0", "1", "2", "3"}
    assert all(len(times) == 20 and (np.diff(times) > 0).all() for times in as_now.values())
    # One probe time is a thousand times the other: a step is 1000**0.75 times as long.
    assert 40 < as_now["0"][-1] / slower["0"][-1] < 800
    assert len(steps.slowdown) == len(steps.seconds) >= 19


def test_the_engine_reproduces_the_captured_text(
    prompts: Path, work: Path, pool: EnginePool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then simulator and engine have the same routes, and differ only in time."""
    steps = tmp_path / "steps.jsonl"
    # So many at once that a slow machine hardly changes which requests share a step.
    options = {"steps-out": steps, "batch": 100, "per-worker": 6, "repeats": 3, "output-tokens": 16}
    out = tmp_path / "validation.json"
    monkeypatch.setattr(replay_command, "EnginePool", lambda *_: nullcontext(pool))
    monkeypatch.setattr(sys, "argv", ["simulator_validation", *arguments(prompts, work, out, **options)])
    for name, value in IN_PROCESS.items():  # the capture needs them, if the first test has not made it
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as end:
        run(simulator_validation)
    assert end.value.code == 0
    result = json.loads(out.read_text())
    assert len(result["rows"]) == 8
    for row in result["rows"]:
        # Batches differ occasionally, since times differ; the text and its experts are the same.
        assert row["simulated_active_experts"] == pytest.approx(row["active_experts"], rel=0.15)
        assert row["regret_mean_us"] >= 0
    assert fit_step_cost(steps).steps == len(steps.read_text().splitlines()) > 100


def test_steps_of_a_random_model_activate_the_prescribed_experts(tmp_path: Path) -> None:
    out = tmp_path / "step_cost.json"
    narrow = "--layers 2 --vocabulary 1024 --hidden 64 --intermediate 32 --context 40"
    small = "--batches 2,4 --active 8,16,32 --rounds 5"
    in_process("benchmarks.engine.step_cost", "--device=cpu", *narrow.split(), *small.split(), f"--out={out}")
    rows = json.loads(out.read_text())["rows"]
    points = [row for row in rows if row["level"] == "point"]
    assert [(row["batch_size"], row["active_experts"]) for row in points] == [
        (2, 8),
        (2, 16),
        (4, 8),
        (4, 16),
        (4, 32),
    ]
    assert all(row["steps"] == 5 and 0 < row["forward_p50_ms"] <= row["step_p50_ms"] for row in points)
    assert [row["of"] for row in rows if row["level"] == "fit"] == ["forward", "step"]
