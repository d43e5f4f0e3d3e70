"""Simulate a deployment under policies, or fit the cost of its decode steps.

python -m offline.simulate --config scenario.yaml --out result.json
python -m offline.simulate --calibrate-from steps.jsonl --out cost.json
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any

import typer

from eldr_serve.client import Client
from eldr_serve.command_errors import BadInput, run
from loadgen.progress import progress_bar
from loadgen.results import publish
from offline.scenario import PolicyChoice, Scenario, Work, read_scenario
from offline.simulation.calibration import FittedCost, fit_steps, from_status
from offline.simulation.cluster import Cluster
from offline.simulation.run import simulate as run_simulation


def simulate(
    out: Annotated[Path, typer.Option(help="JSON to write: rows of a result, or a step cost.")],
    config: Annotated[Path | None, typer.Option(help="Scenario (YAML): cluster, workload, policies.")] = None,
    cost: Annotated[
        Path | None, typer.Option(help="Step cost (JSON, from --calibrate-from), replaces the scenario's.")
    ] = None,
    calibrate_from: Annotated[
        str | None,
        typer.Option(help="Fit a step cost: JSON lines of steps, or the URL of a running service."),
    ] = None,
    processes: Annotated[
        int, typer.Option(min=1, help="Parallel runs; above 1 they are tasks of a Ray cluster.")
    ] = 1,
    dry_run: Annotated[bool, typer.Option(help="Check everything and print what would run.")] = False,
) -> None:
    """Run each policy and seed; print a table and write JSON."""
    if (config is None) == (calibrate_from is None):
        raise BadInput("give either --config or --calibrate-from")
    if not out.parent.is_dir():
        raise BadInput(f"the folder {out.parent} does not exist")
    if calibrate_from is not None:
        _calibrate(calibrate_from, out)
        return
    assert config is not None
    scenario = read_scenario(config)
    if cost is not None:
        scenario = with_cost(scenario, FittedCost.load(cost))
    runs = len(scenario.seeds) * len(scenario.policies)
    requests = len(Work(scenario, scenario.seeds[0]).requests)
    if dry_run:
        typer.echo(f"{runs} runs of {requests} requests on {scenario.cluster.decode.workers} workers")
        return
    rows = simulated(scenario, runs * requests, processes)
    publish(
        "simulate", rows, seed=scenario.seeds[0], out=out, inputs=json.loads(scenario.model_dump_json()),
        notes="simulated; nothing here was measured on an engine",
    )  # fmt: skip


def simulated(scenario: Scenario, total: int, processes: int) -> list[dict[str, Any]]:
    """Return a row for each policy and seed, seed by seed; show progress to `total` requests."""
    with progress_bar() as progress:
        bar = progress.add_task("simulating", total=total)
        if processes == 1:
            rows = []
            for seed in scenario.seeds:
                work = Work(scenario, seed)
                for choice in scenario.policies:
                    progress.update(bar, description=f"{choice.shown}, seed {seed}")
                    rows.append(one_run(scenario, choice, seed, work, lambda n: progress.advance(bar, n)))
            return rows
        return _in_parallel(scenario, processes, lambda runs: progress.advance(bar, total / runs))


def one_run(
    scenario: Scenario,
    choice: PolicyChoice,
    seed: int,
    work: Work | None = None,
    on_finished: Callable[[int], None] = lambda n: None,
) -> dict[str, Any]:
    """Return the row of one policy and seed; `work` is the seed's, if already made."""
    work = work or Work(scenario, seed)
    started = time.perf_counter()
    outcome = run_simulation(
        work.requests,
        work.policy(choice, scenario.cluster),
        scenario.cluster,
        experts=work.experts,
        seed=seed,
        on_finished=on_finished,
    )
    seconds = time.perf_counter() - started
    return {
        "policy": choice.shown,
        "seed": seed,
        **outcome.summary(),
        "steps": len(outcome.batch),
        "simulated_steps_per_s": len(outcome.batch) / seconds,
    }


def with_cost(scenario: Scenario, fitted: FittedCost) -> Scenario:
    """Return the scenario with another step cost."""
    decode = scenario.cluster.decode.model_copy(update={"cost": fitted.cost})
    cluster: Cluster = scenario.cluster.model_copy(update={"decode": decode})
    return scenario.model_copy(update={"cluster": cluster})


def _in_parallel(scenario: Scenario, processes: int, on_row: Callable[[int], None]) -> list[dict[str, Any]]:
    import ray

    if not ray.is_initialized():
        where: dict[str, Any] = {"address": "local", "num_cpus": processes}
        if "RAY_ADDRESS" in os.environ:
            where = {"address": os.environ["RAY_ADDRESS"]}
        ray.init(**where, log_to_driver=False, logging_level="warning")
    task = ray.remote(num_cpus=1)(one_run)
    todo = [(choice, seed) for seed in scenario.seeds for choice in scenario.policies]
    rows: list[dict[str, Any]] = []
    with ThreadPoolExecutor(processes) as waiting:
        for row in waiting.map(lambda job: ray.get(task.remote(scenario, *job)), todo):
            rows.append(row)
            on_row(len(todo))
    return rows


def _calibrate(source: str, out: Path) -> None:
    if source.startswith(("http://", "https://")):
        status = Client(source, os.environ.get("ELDR_ADMIN_KEY"), timeout_s=10).status()
        fitted = from_status(status, source)
    else:
        fitted = fit_steps(Path(source))
    fitted.save(out)
    terms = ", ".join(f"{name} {1e6 * value:.3g} us" for name, value in fitted.cost.as_dict().items())
    typer.echo(f"{fitted.steps} steps: {terms}; error {fitted.rms_relative_error:.1%} rms; wrote {out}")


if __name__ == "__main__":
    run(simulate)
