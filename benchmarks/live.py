"""TPOT, TTFT and active experts of every policy on real engines that run together (Figures 11 to 13).

    python -m benchmarks.live

The whole product under load: 1 prefill and 4 decode engines behind the real ingress, open-loop Poisson
arrivals, policies in random order in every round (loadgen.compare). The locality-band's table is fitted
on prompts of the capture. On a machine with fewer cores than engines they wait for each other; then the
work that a policy saves anywhere shortens everybody's steps, and load balance matters less than it
would. See decode_replay for the same without contention.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.rig.capture import Captured, captured
from benchmarks.rig.cluster import local_ray, unwind_on_sigterm
from benchmarks.rig.engines import our_arguments
from benchmarks.rig.options import (
    PROMPTS,
    WORK,
    CapturedOption,
    OutOption,
    PromptsOption,
    SeedOption,
    WorkOption,
)
from benchmarks.rig.replay import widened
from benchmarks.streams import wait_ready
from eldr_serve.fitting import fit_table
from loadgen.figures import BASELINES
from offline.cli import BadInput, run
from offline.results import publish

POLICIES = ",".join((*BASELINES, "locality-band", "marginal-cost"))


def live(
    prompts: PromptsOption = PROMPTS,
    policies: Annotated[str, typer.Option(help="Policies, with commas.")] = POLICIES,
    rate: Annotated[float, typer.Option(min=0.1, help="Requests/s, Poisson arrivals.")] = 4.0,
    rounds: Annotated[int, typer.Option(min=1, help="Blocks of each policy.")] = 4,
    block_seconds: Annotated[int, typer.Option(min=5, help="Measured part of a block, s.")] = 30,
    warm_up_seconds: Annotated[int, typer.Option(min=1, help="Load before it, s.")] = 8,
    deployment: Annotated[Path, typer.Option(help="Deployment YAML.")] = Path("deployments/cpu_demo_4d.yaml"),
    intermediate: Annotated[int, typer.Option(min=32, help="Neurons an expert.")] = 512,
    requests: CapturedOption = 2400,
    port: Annotated[int, typer.Option(help="HTTP port; the next one is for metrics.")] = 8340,
    work: WorkOption = WORK,
    seed: SeedOption = 0,
    out: OutOption = None,
) -> None:
    """Serve, fit, and compare policies under the same load."""
    unwind_on_sigterm()
    data = captured(prompts, work, requests=requests, seed=seed)
    arguments = our_arguments(deployment, widened(intermediate, work))
    options = {
        "policies": policies, "prompts": prompts, "rate": rate, "rounds": rounds, "seed": seed,
        "block-seconds": block_seconds, "warm-up-seconds": warm_up_seconds,
    }  # fmt: skip
    result = served(arguments, data, options, port=port, folder=work / "live", seed=seed)
    publish(
        "live", result["rows"], seed=seed, out=out, notes=result["notes"],
        inputs=result["inputs"] | {"deployment": deployment.stem, "intermediate": intermediate},
    )  # fmt: skip


def served(
    arguments: dict[str, Any], data: Captured, options: dict[str, Any], *, port: int, folder: Path, seed: int
) -> dict[str, Any]:
    """Serve with these `args` and a table fitted on all of `data`; what loadgen.compare then says.

    A comparison in `folder` that was stopped goes on; one that has ended was another run's.
    """
    comparison = folder / "comparison"
    if (comparison / "compare.json").exists():
        shutil.rmtree(comparison)
    workers = arguments["decode_config"]["deployment_config"]["num_replicas"]
    folder.mkdir(parents=True, exist_ok=True)
    table = (folder / f"table_{workers}.safetensors").resolve()
    fit_table(data.trace.subset(data.group("all")), workers, seed=seed)[0].save(table)
    arguments |= {"router": {"policy": "shortest-queue", "table": str(table)}, "admin_key": "live"}
    with local_ray(http_port=port, metrics_port=port + 1):
        from ray import serve

        from eldr_serve.serving.app import build_app

        serve.run(build_app(arguments), name="eldr", route_prefix="/")
        url = f"http://127.0.0.1:{port}"
        wait_ready(url, 300)
        options |= {"host": url, "out": comparison, "metrics": f"http://127.0.0.1:{port + 1}/metrics"}
        done = subprocess.run(
            [sys.executable, "-m", "loadgen.compare", *(f"--{k}={v}" for k, v in options.items())],
            env=os.environ | {"ELDR_ADMIN_KEY": "live"},
            check=False,
        )
    if done.returncode:
        raise BadInput(f"the comparison ended with status {done.returncode}; see {comparison}")
    result: dict[str, Any] = json.loads((comparison / "compare.json").read_text())
    return result


if __name__ == "__main__":
    run(live)
