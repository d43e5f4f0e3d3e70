"""Run the most useful benchmarks in a few minutes on a GPU, the most useful first, each with a time limit.

    python -m benchmarks.gpu --seconds 540 --out out/gpu

A step is a benchmark in its own process. Its result and log are in the folder. A step that has a result there
is skipped, so a second start continues where the first one ended. The result of a step that failed or timed
out gets the suffix `.failed`, and a second start repeats the step. A step that hangs or crashes costs no more
than its own limit.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import psutil
import typer

from benchmarks.lib.cluster import ROOT, python_path, unwind_on_sigterm
from eldr_serve.commands.run import run
from eldr_serve.errors import UserInputError
from loadgen.results import print_table, publish

BENCHMARKS = {"gpu": "named"}
_GRACE_S = 5.0  # time between SIGTERM and SIGKILL
_REPORT_EVERY_S = 20.0  # time between messages about a running step
_SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER of Linux


@dataclass(frozen=True)
class BenchmarkStep:
    """One benchmark on a GPU."""

    letter: str  # short name
    command: tuple[str, ...]  # arguments of Python, to which `--out FILE` is added
    seconds: float  # expected duration; a step that needs more time than is left is left out
    limit_s: float  # time after which the step is killed
    name: str  # name of the files of its result


def _step(letter: str, name: str, command: str, seconds: float, limit_s: float) -> BenchmarkStep:
    return BenchmarkStep(letter, ("-m", *f"benchmarks.{command}".split()), seconds, limit_s, f"gpu_{name}")


_REPLAY = (
    "engine.replays decode_replay --device cuda --intermediate 9824 --requests 640 --workers 8 "
    "--groups language,task --arms shortest-queue,locality-band,marginal-cost"
)
_CAPTURE = "engine.capture_overhead --device cuda --requests 0 --wide-layers 48 --wide-vocabulary 151936"
_LAYER = "engine.moe_layer_latency --shape qwen3-30b-a3b,gpt-oss-120b --device cuda"
STEPS = (  # the most useful steps first; their seconds are estimates
    _step("a", "exact_counts", "engine.exact_counts --device cuda", 90, 180),
    _step("b", "moe_layer_latency", _LAYER, 60, 150),
    _step("c", "step_cost", "engine.step_cost", 90, 180),
    _step("d", "replay", _REPLAY, 90, 180),
    _step("e", "capture_overhead", _CAPTURE, 80, 150),
    _step("f", "metro_decide", "engine.metro_decide", 40, 90),
    _step("g", "application", "serving.gpu_application", 120, 210),
)


def gpu(
    seconds: Annotated[float, typer.Option(min=1, help="Time for all steps, s.")] = 540,
    steps: Annotated[str, typer.Option(help="Letters of the steps to run; default: all.")] = "",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan and run nothing.")] = False,
    out: Annotated[Path, typer.Option(help="Folder of results and logs.")] = Path("out/gpu"),
) -> None:
    """Run the steps that have no result yet. The exit status is 1 if one failed or timed out."""
    chosen_steps = [step for step in STEPS if not steps or step.letter in steps]
    unknown = sorted(set(steps) - {step.letter for step in STEPS} - set(", "))
    if unknown:
        raise UserInputError(
            f"--steps has {unknown[0]!r}; choose from {''.join(step.letter for step in STEPS)}"
        )
    if dry_run:
        return print_table("plan", [_plan_row(step, out) for step in chosen_steps])
    if not shutil.which("nvidia-smi"):
        raise UserInputError("there is no nvidia-smi here: run this on a machine with an NVIDIA GPU")
    out.mkdir(parents=True, exist_ok=True)
    unwind_on_sigterm()
    rows = run_steps(chosen_steps, out.resolve(), seconds)
    publish(
        "gpu",
        rows,
        inputs={"seconds": seconds},
        seed=0,
        out=out / "gpu.json",
        notes="State of each step. A step is left out if it needs more time than is left.",
    )
    if any(row["state"].startswith(("failed", "timed out")) for row in rows):
        raise typer.Exit(1)


def _plan_row(step: BenchmarkStep, out: Path) -> dict[str, Any]:
    state = "has a result" if (out / f"{step.name}.json").exists() else "to run"
    row = {"step": step.letter, "state": state, "seconds": step.seconds, "limit_s": step.limit_s}
    return row | {"command": " ".join(["python", *step.command])}


def run_steps(steps: Sequence[BenchmarkStep], out: Path, seconds: float) -> list[dict[str, Any]]:
    """Run the steps one after the other within `seconds`.

    Returns:
        A row for each step: `step`, `state` (done, done before, failed, timed out, left out) and `seconds`,
        the time that the step took or, if it was left out, would need.
    """
    if sys.platform == "linux":  # orphans of a dead step become children of this process
        ctypes.CDLL(None).prctl(_SUBREAPER, 1, 0, 0, 0)
    end, rows = time.monotonic() + seconds, []
    for step in steps:
        remaining_s = end - time.monotonic()
        if (out / f"{step.name}.json").exists():
            state, seconds_of_step = "done before", 0.0
        elif remaining_s < step.seconds:
            state, seconds_of_step = "left out", step.seconds
        else:
            state, seconds_of_step = _run(step, out, min(step.limit_s, remaining_s))
        _say(f"{step.name}: {state}, {seconds_of_step:.0f} s; {end - time.monotonic():.0f} s are left")
        rows.append({"step": step.name, "state": state, "seconds": round(seconds_of_step, 1)})
    return rows


def _run(step: BenchmarkStep, out: Path, limit_s: float) -> tuple[str, float]:
    """Run a step and all its processes to their end, and return its state and seconds."""
    result, log, start = out / f"{step.name}.json", out / f"{step.name}.log", time.monotonic()
    _say(f"{step.name}: started, at most {limit_s:.0f} s; log in {log}")
    with log.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, *step.command, "--out", str(result)],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            cwd=ROOT,
            env=os.environ | {"PYTHONUNBUFFERED": "1", "PYTHONPATH": python_path()},
        )
    others = {child.pid for child in psutil.Process().children()} - {process.pid}
    status = None
    try:
        while process.poll() is None and time.monotonic() - start < limit_s:
            until = min(limit_s, time.monotonic() - start + _REPORT_EVERY_S)
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, until - (time.monotonic() - start)))
                break
            _say(f"{step.name}: {time.monotonic() - start:.0f} s, {_last_line(log)}")
        status = process.poll()
    finally:
        _end(process, others)
        if status != 0 and result.exists():  # an incomplete or wrong result
            result.replace(result.with_name(f"{result.name}.failed"))
    seconds = time.monotonic() - start
    if status is None:
        return f"timed out after {limit_s:.0f} s", seconds
    if status == 0:
        return "done", seconds
    return f"failed with {status}: {_last_line(log)}", seconds


def _end(process: subprocess.Popen[bytes], others: set[int]) -> None:
    """Kill a step's process group, and the children of this process that have left it, except `others`."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    with suppress(subprocess.TimeoutExpired):
        process.wait(_GRACE_S)
    for _ in range(10):  # orphans of a killed process become children of this one
        orphans = []
        for child in psutil.Process().children(recursive=True):
            with suppress(psutil.Error):
                if not {child.pid, *(parent.pid for parent in child.parents())} & others:
                    orphans.append(child)
                    child.kill()
        if not orphans:
            break
        psutil.wait_procs(orphans, timeout=1)


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").split("\n")
    return next((line.strip()[-160:] for line in reversed(lines) if line.strip()), "nothing in the log")


def _say(sentence: str) -> None:
    print(time.strftime("%H:%M:%S"), sentence, flush=True)


if __name__ == "__main__":
    run(gpu)
