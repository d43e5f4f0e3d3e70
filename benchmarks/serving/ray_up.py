"""Run a Ray cluster on this machine over SSH, from `ray up` to `ray down`, step by step like an operator.

    python -m benchmarks.serving.ray_up --dry-run
    python -m benchmarks.serving.ray_up

The steps start the cluster, deploy the application, calibrate and refit as Ray jobs, send load by locust, and
stop the cluster. No process may be left at the end. The top of `ray_cluster_local.yaml` lists the
requirements of this machine.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import psutil
import typer
import yaml

from benchmarks.lib import options
from benchmarks.lib.cluster import ROOT, unwind_on_sigterm, wait_ready
from eldr_serve.commands.errors import run
from eldr_serve.errors import UserInputError
from loadgen.results import publish

BENCHMARKS = {"ray_up": "all"}
_CLUSTER = "ray_cluster_local.yaml"
_DASHBOARD = "http://127.0.0.1:8265"
_URL = "http://127.0.0.1:8000"
_TRACE = "/tmp/eldr-serve-trace.safetensors"  # a job's working directory is removed at its end
_JOB = f"ray job submit --address {_DASHBOARD} --working-dir . --"
_DEPLOYMENT = "deployments/cpu_demo.yaml"
_PROMPTS = "examples/demo_model/prompts"
UP, DOWN = f"ray up -y {_CLUSTER}", f"ray down -y {_CLUSTER}"
STOP = f"ray exec {_CLUSTER} '~/eldr-serve-cluster/.venv/bin/ray stop'"  # `ray down` does not find `ray`


def steps(requests: int, run_time_s: int) -> dict[str, str]:
    """Return the steps between up and down, in order: name -> command line."""
    return {
        "serve deploy": f"serve deploy -a {_DASHBOARD} {_DEPLOYMENT}",
        "ready": "",
        "calibrate": f"{_JOB} eldr calibrate --deployment {_DEPLOYMENT} --prompts {_PROMPTS} "
        f"--limit {requests} --max-tokens 32 --out {_TRACE}",
        "refit": f"{_JOB} eldr refit --trace {_TRACE} --swap",
        "locust": f"locust -f loadgen/locustfile.py --headless --host {_URL} --prompts {_PROMPTS} "
        f"--users 4 --spawn-rate 4 --run-time {run_time_s}s --max-tokens 32",
    }


def left_behind(folder: Path) -> list[str]:
    """Return the command lines of processes that run a program of this folder, or run in it."""
    commands = []
    for process in psutil.process_iter(["cwd", "cmdline"]):
        cwd, command = process.info["cwd"] or "", " ".join(process.info["cmdline"] or ())
        if Path(cwd).is_relative_to(folder) or f"{folder}/" in command:
            commands.append(command)
    return commands


def _execute(name: str, command: str) -> dict[str, Any]:
    """Run a command and return its row. Raise UserInputError, after its last output, if it failed."""
    typer.echo(f"== {name}: {command or f'waiting for {_URL}/eldr/status to report ready'}")
    start = time.monotonic()
    if command:
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
    else:
        wait_ready(_URL, 600)
    return {"step": name, "seconds": time.monotonic() - start}


def ray_up(
    requests: Annotated[int, typer.Option(min=4, help="Prompts of the calibration job.")] = 60,
    run_time_s: Annotated[int, typer.Option(min=5, help="Load by locust, s.")] = 30,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the commands, and run nothing.")] = False,
    out: options.Out = None,
) -> None:
    """Start a cluster on this machine, deploy, calibrate, refit, load, and stop it without residue."""
    middle_steps = steps(requests, run_time_s)
    if dry_run:
        typer.echo("\n".join(filter(None, [UP, *middle_steps.values(), STOP, DOWN])))
        return
    unwind_on_sigterm()
    (mount,) = yaml.safe_load((ROOT / _CLUSTER).read_text())["file_mounts"]
    folder = Path(mount).expanduser()
    if processes_before := left_behind(folder):
        raise UserInputError(
            f"a cluster already runs in {folder}; stop it by `{STOP}`: {processes_before[0][:80]}"
        )
    had_environment = (folder / ".venv").exists()
    rows = []
    try:
        rows += [_execute("ray up", UP), *(_execute(name, command) for name, command in middle_steps.items())]
    finally:
        try:
            rows.append(_execute("ray stop", STOP))
        finally:
            rows.append(_execute("ray down", DOWN))
        Path(_TRACE).unlink(missing_ok=True)
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
