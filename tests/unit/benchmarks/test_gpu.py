"""The steps of a GPU session: no step delays or stops the others, and a second start resumes."""

import importlib
import json
import time
from pathlib import Path

import psutil
import pytest

from benchmarks import gpu
from benchmarks.gpu import STEPS, BenchmarkStep, run_steps
from tests.support.in_process import command, sentence

WRITES = "import pathlib, sys; pathlib.Path(sys.argv[-1]).write_text('{}')"
CRASHES = "print('before'); raise SystemExit('no kernel for this card')"
# A program that ignores SIGTERM, and so does its child, which has a session of its own.
HANGS = """
import os, pathlib, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], start_new_session=True)
pathlib.Path(sys.argv[1]).write_text(f'{os.getpid()} {child.pid}')
print('sleeps', flush=True)
time.sleep(600)
"""


def step(
    letter: str, code: str, *arguments: object, seconds: float = 0.1, limit_s: float = 60
) -> BenchmarkStep:
    return BenchmarkStep(letter, ("-c", code, *map(str, arguments)), seconds, limit_s, f"{letter}_fake")


def test_a_step_that_hangs_or_crashes_costs_only_its_own_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu, "_GRACE_S", 0.2)
    pids = tmp_path / "pids"
    start = time.monotonic()
    rows = run_steps([step("x", HANGS, pids, limit_s=3), step("y", CRASHES), step("z", WRITES)], tmp_path, 60)
    assert time.monotonic() - start < 30
    assert [row["step"] for row in rows] == ["x_fake", "y_fake", "z_fake"]
    hung, crashed, written = (row["state"] for row in rows)
    assert hung == "timed out after 3 s"
    assert crashed == "failed with 1: no kernel for this card"
    assert written == "done"
    assert not any(map(psutil.pid_exists, map(int, pids.read_text().split())))
    assert "sleeps" in (tmp_path / "x_fake.log").read_text()


def test_a_second_start_runs_steps_without_results_that_fit(tmp_path: Path) -> None:
    steps = [step("x", WRITES), step("y", WRITES, seconds=100)]
    assert [row["state"] for row in run_steps(steps, tmp_path, 50)] == ["done", "left out"]
    assert run_steps(steps, tmp_path, 50)[1]["seconds"] == 100  # the time that it needs
    assert [row["state"] for row in run_steps(steps, tmp_path, 150)] == ["done before", "done"]


@pytest.mark.parametrize(
    ("code", "state"),
    [
        ("sys.exit('no plots')", "failed with 1: no plots"),
        ("import time; time.sleep(60)", "timed out after 3 s"),
    ],
)
def test_the_result_of_a_step_that_does_not_succeed_is_kept_apart(
    tmp_path: Path, code: str, state: str
) -> None:
    (row,) = run_steps([step("x", f"{WRITES}; {code}", limit_s=3)], tmp_path, 50)
    assert row["state"] == state
    assert (tmp_path / "x_fake.json.failed").read_text() == "{}"
    assert [row["state"] for row in run_steps([step("x", WRITES)], tmp_path, 50)] == ["done"]


def test_the_plan_runs_nothing(tmp_path: Path) -> None:
    (tmp_path / f"{STEPS[0].name}.json").write_text("{}")
    done = command("benchmarks.gpu", "--dry-run", out=tmp_path)
    assert done.exit_code == 0
    assert "has a result" in done.stdout
    assert all(step.command[1] in done.stdout for step in STEPS)
    assert len(list(tmp_path.iterdir())) == 1


def test_steps_are_lettered_in_their_order() -> None:
    assert "".join(step.letter for step in STEPS) == "abcdefg"


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.letter)
def test_a_step_is_a_benchmark_with_these_options(step: BenchmarkStep) -> None:
    module, *words = step.command[1:]
    stem = module.rpartition(".")[2]
    name = words[0] if words and stem != words[0] and not words[0].startswith("-") else stem
    help_text = command(getattr(importlib.import_module(module), name), "--help").stdout
    assert not [word for word in words if word.startswith("--") and word not in help_text]


def test_the_command_writes_states_and_fails_with_a_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu, "STEPS", (step("x", WRITES), step("y", CRASHES)))
    monkeypatch.setattr(gpu.shutil, "which", lambda _: "nvidia-smi")
    assert command("benchmarks.gpu", out=tmp_path, steps="x").exit_code == 0
    assert command("benchmarks.gpu", out=tmp_path).exit_code == 1
    result = json.loads((tmp_path / "gpu.json").read_text())
    assert [row["state"].split()[0] for row in result["rows"]] == ["done", "failed"]


def test_bad_input_is_reported_in_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "'q'" in sentence(command("benchmarks.gpu", out=tmp_path, steps="aq"))
    monkeypatch.setattr(gpu.shutil, "which", lambda _: None)
    assert "nvidia-smi" in sentence(command("benchmarks.gpu", out=tmp_path))
