"""Run a Ray cluster on this machine over SSH, from `ray up` to `ray down`, step by step like an operator.

    python -m benchmarks.serving.ray_up --dry-run
    python -m benchmarks.serving.ray_up

The steps start the cluster, deploy the application, calibrate and refit as Ray jobs, send load with locust,
and stop the cluster. No process may be left at the end. The top of `ray_cluster_local.yaml` lists the
requirements of this machine.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import psutil
import typer
import yaml

from benchmarks.lib import options
from benchmarks.lib.cluster import ROOT, unwind_on_sigterm, wait_ready
from eldr_serve.commands.run import run
from eldr_serve.errors import UserInputError
from loadgen.results import publish

BENCHMARKS = {"ray_up": "all"}
_CLUSTER = "ray_cluster_local.yaml"
_DASHBOARD = "http://127.0.0.1:8265"
_URL = "http://127.0.0.1:8000"
_TRACE = Path.home() / "eldr-serve-trace.safetensors"  # a job's working directory is removed at its end
_JOB = f"ray job submit --address {_DASHBOARD} --working-dir . --"
_DEPLOYMENT = "deployments/cpu_demo.yaml"
_PROMPTS = "examples/demo_model/prompts"
UP, DOWN = f"ray up -y {_CLUSTER}", f"ray down -y {_CLUSTER}"
STOP = f"ray exec {_CLUSTER} '~/eldr-serve-cluster/.venv/bin/ray stop'"  # `ray down` does not find `ray`


class Step(NamedTuple):
    """A step of the run.

    Attributes:
        name: name of the step's row.
        command: its command line, or a comment that says what it waits for.
        run: runs the step; raises UserInputError or TimeoutError if it fails.
    """

    name: str
    command: str
    run: Callable[[], None]


def steps(requests: int, run_time_s: int) -> list[Step]:
    """Return the steps between up and down, in order."""
    return [
        _command_step("serve deploy", f"serve deploy -a {_DASHBOARD} {_DEPLOYMENT}"),
        Step("ready", f"# wait until {_URL}/eldr/status says so", partial(wait_ready, _URL, 600)),
        _command_step(
            "calibrate",
            f"{_JOB} eldr calibrate --deployment {_DEPLOYMENT} --prompts {_PROMPTS} "
            f"--limit {requests} --max-tokens 32 --out {_TRACE}",
        ),
        _command_step("refit", f"{_JOB} eldr refit --trace {_TRACE} --swap"),
        _command_step(
            "locust",
            f"locust -f loadgen/locustfile.py --headless --host {_URL} --prompts {_PROMPTS} "
            f"--users 4 --spawn-rate 4 --run-time {run_time_s}s --max-tokens 32",
        ),
    ]


def left_behind(folder: Path) -> list[str]:
    """Return the command lines of processes that run a program of this folder, or run in it."""
    commands = []
    for process in psutil.process_iter(["cwd", "cmdline"]):
        cwd, command = process.info["cwd"] or "", " ".join(process.info["cmdline"] or ())
        if Path(cwd).is_relative_to(folder) or f"{folder}/" in command:
            commands.append(command)
    return commands


def _command_step(name: str, command: str) -> Step:
    return Step(name, command, partial(_run_command, name, command))


def _run_command(name: str, command: str) -> None:
    """Run a command. Raise UserInputError, after its last output, if it failed."""
    program, *rest = shlex.split(command)
    done = subprocess.run(
        [str(Path(sys.executable).with_name(program)), *rest],
        cwd=ROOT,
        env=os.environ | {"RAY_AUTH_MODE": "disabled"},
        check=False,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if done.returncode:
        typer.echo(done.stdout[-4000:], err=True)
        raise UserInputError(f"{name} ended with status {done.returncode}; its last output is above")


def _execute(step: Step) -> dict[str, Any]:
    """Run a step and return its row."""
    typer.echo(f"== {step.name}: {step.command}")
    start = time.monotonic()
    step.run()
    return {"step": step.name, "seconds": time.monotonic() - start}


def ray_up(
    requests: Annotated[int, typer.Option(min=4, help="Prompts of the calibration job.")] = 60,
    run_time_s: Annotated[int, typer.Option(min=5, help="Load by locust, s.")] = 30,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the commands, and run nothing.")] = False,
    out: options.Out = None,
) -> None:
    """Start a cluster on this machine, deploy, calibrate, refit, load, and stop it without residue."""
    middle_steps = steps(requests, run_time_s)
    if dry_run:
        typer.echo("\n".join([UP, *(step.command for step in middle_steps), STOP, DOWN]))
        return
    unwind_on_sigterm()
    (mount,) = yaml.safe_load((ROOT / _CLUSTER).read_text())["file_mounts"]
    folder = Path(mount).expanduser()
    if processes_before := left_behind(folder):
        raise UserInputError(
            f"a cluster already runs in {folder}; stop it with `{STOP}`: {processes_before[0][:80]}"
        )
    had_environment = (folder / ".venv").exists()
    rows = []
    try:
        rows += [_execute(step) for step in (_command_step("ray up", UP), *middle_steps)]
    finally:
        try:
            rows.append(_execute(_command_step("ray stop", STOP)))
        finally:
            rows.append(_execute(_command_step("ray down", DOWN)))
        _TRACE.unlink(missing_ok=True)
        remaining = left_behind(folder)
        for command in remaining:
            typer.echo(f"still running: {command[:160]}", err=True)
    rows.append({"step": "processes left", "count": len(remaining)})
    publish(
        "ray_up",
        rows,
        seed=0,
        out=out,
        inputs={
            "cluster": _CLUSTER,
            "deployment": _DEPLOYMENT,
            "requests": requests,
            "run_time_s": run_time_s,
            "installed_before": had_environment,
        },
        notes="Wall-clock time of each step, measured once. A failed request or swap ends the run.",
    )
    if remaining:
        raise UserInputError(f"{len(remaining)} processes still run after `{DOWN}`")


if __name__ == "__main__":
    run(ray_up)
