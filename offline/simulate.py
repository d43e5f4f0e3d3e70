"""Simulate a deployment under policies, or fit the cost of its decode steps.

    python -m offline.simulate --config scenario.yaml --out result.json
    python -m offline.simulate --calibrate-from steps.jsonl --out cost.json

A scenario describes the cluster, the workload and the policies (offline/scenario.py).
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from eldr_serve.commands.client import OperatorClient
from eldr_serve.commands.run import run
from eldr_serve.errors import UserInputError
from eldr_serve.files import require_folders
from eldr_serve.scheduling.cost_file import FittedCost
from loadgen.progress import progress_bar
from loadgen.results import publish
from loadgen.statistics import LatencyObjective
from offline.scenario import PolicyChoice, Scenario, ScenarioInputs, read_scenario, routes_of
from offline.simulation.calibration import cost_from_status, fit_step_cost
from offline.simulation.cluster import Cluster
from offline.simulation.run import simulate as run_simulation


def simulate(
    out: Annotated[Path, typer.Option(help="JSON to write: rows of a result, or a step cost.")],
    config: Annotated[Path | None, typer.Option(help="Scenario (YAML): cluster, workload, policies.")] = None,
    cost: Annotated[
        Path | None,
        typer.Option(help="Step cost (JSON, from --calibrate-from or `eldr cost`), replaces the scenario's."),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(help="CalibrationTrace whose requests run, replaces the scenario's experts.path."),
    ] = None,
    fit_trace: Annotated[
        Path | None,
        typer.Option(help="CalibrationTrace to fit tables to; default: a share of the requests' trace."),
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(
            min=1, help="Decode workers; prefill workers and arrivals (rate_per_s) grow in proportion."
        ),
    ] = None,
    calibrate_from: Annotated[
        str | None,
        typer.Option(help="Fit a step cost: JSON lines of steps, or the URL of a running service."),
    ] = None,
    processes: Annotated[
        int, typer.Option(min=1, help="Parallel runs; above 1 they are tasks of a Ray cluster.")
    ] = 1,
    by_domain: Annotated[bool, typer.Option(help="Add a row of TPOT for each domain.")] = False,
    dry_run: Annotated[bool, typer.Option(help="Check everything and print what would run.")] = False,
) -> None:
    """Run each policy and seed. Print a table and write JSON."""
    if (config is None) == (calibrate_from is None):
        raise UserInputError("give either --config or --calibrate-from")
    require_folders(out)
    if calibrate_from is not None:
        _fit_cost(calibrate_from, out)
        return
    assert config is not None
    scenario = _apply_options(read_scenario(config), cost, trace, fit_trace, workers)
    first = ScenarioInputs(scenario, scenario.seeds[0])
    if by_domain:
        first.require_domains()
    if dry_run:
        runs, workers = len(scenario.seeds) * len(scenario.policies), scenario.cluster.decode.workers
        typer.echo(f"{runs} runs of {len(first.requests)} requests on {workers} workers")
        return
    rows = simulate_all(scenario, first, processes, by_domain=by_domain)
    publish(
        "simulate",
        rows,
        seed=scenario.seeds[0],
        out=out,
        inputs=json.loads(scenario.model_dump_json()),
        notes="simulated; nothing here was measured on an engine",
    )


def simulate_all(
    scenario: Scenario, first: ScenarioInputs, processes: int, *, by_domain: bool = False
) -> list[dict[str, Any]]:
    """Simulate each policy and seed, seed by seed, show the progress, and return the rows.

    Args:
        first: the inputs of the first seed.
        by_domain: also return a row for each domain after the row of its run, whose domain is "all".
    """
    total = len(scenario.seeds) * len(scenario.policies) * len(first.requests)
    with progress_bar() as progress:
        bar = progress.add_task("simulating", total=total)
        rows: list[dict[str, Any]] = []
        if processes > 1:
            advance = partial(progress.advance, bar)
            rows = _simulate_in_parallel(scenario, processes, by_domain, lambda runs: advance(total / runs))
        else:
            for number, seed in enumerate(scenario.seeds):
                inputs = ScenarioInputs(scenario, seed) if number else first
                for choice in scenario.policies:
                    progress.update(bar, description=f"{choice.display_name}, seed {seed}")
                    rows.append(
                        one_run(scenario, choice, seed, inputs, partial(progress.advance, bar), by_domain)
                    )
    return [line for row in rows for line in _split_by_domain(row)]


def _split_by_domain(row: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the row of a run, and after it the row of each domain if there are domains."""
    domains = row.pop("domains", None)
    if domains is None:
        return [row]
    run = {key: row.pop(key) for key in ("policy", "seed")}
    whole = {"domain": "all", "requests": sum(domain["requests"] for domain in domains)}
    return [run | line for line in (whole | row, *domains)]


def one_run(
    scenario: Scenario,
    choice: PolicyChoice,
    seed: int,
    inputs: ScenarioInputs | None = None,
    on_finished: Callable[[int], None] = lambda n: None,
    by_domain: bool = False,
) -> dict[str, Any]:
    """Simulate one policy and seed, and return its row.

    Args:
        inputs: the inputs of the seed, if they have been made already.
        on_finished: callback with the number of requests that have finished since the last call.
        by_domain: add the rows of each domain to the row, as `domains`.
    """
    inputs = inputs or ScenarioInputs(scenario, seed)
    started = time.perf_counter()
    outcome = run_simulation(
        inputs.requests,
        inputs.policy(choice, scenario.cluster),
        scenario.cluster,
        experts=inputs.experts,
        seed=seed,
        on_finished=on_finished,
    )
    seconds = time.perf_counter() - started
    objectives = scenario.objectives
    row = {
        "policy": choice.display_name,
        "seed": seed,
        **outcome.summary(LatencyObjective(objectives.ttft_ms, objectives.tpot_ms) if objectives else None),
        "steps": len(outcome.batch),
        "simulated_steps_per_s": len(outcome.batch) / seconds,
    }
    return row | ({"domains": outcome.summarise_domains(inputs.domains)} if by_domain else {})


def _apply_options(
    scenario: Scenario, cost: Path | None, trace: Path | None, fit_trace: Path | None, workers: int | None
) -> Scenario:
    """Return the scenario with the parts that the command line replaces."""
    if cost is not None:
        scenario = replace_cost(scenario, FittedCost.load(cost))
    if trace is not None or fit_trace is not None:
        scenario = replace_traces(scenario, trace, fit_trace)
    return scenario if workers is None else scale_workers(scenario, workers)


def replace_cost(scenario: Scenario, fitted: FittedCost) -> Scenario:
    """Return the scenario with another step cost."""
    decode = scenario.cluster.decode.model_copy(update={"cost": fitted.cost})
    cluster: Cluster = scenario.cluster.model_copy(update={"decode": decode})
    return scenario.model_copy(update={"cluster": cluster})


def replace_traces(scenario: Scenario, trace: Path | None, fit_trace: Path | None) -> Scenario:
    """Return the scenario with other requests to run, or to fit tables to."""
    experts = scenario.experts
    if trace is not None:
        named = routes_of(trace)
        changes = {"path": trace, "kind": named.kind}
        experts = named if experts is None else experts.model_copy(update=changes)
    if experts is None:
        raise UserInputError("--fit-trace needs --trace, since the scenario has no experts")
    if fit_trace is not None:
        experts = experts.model_copy(update={"fit_path": fit_trace})
    return scenario.model_copy(update={"experts": experts})


def scale_workers(scenario: Scenario, workers: int) -> Scenario:
    """Return the scenario with other decode workers, and prefill workers and arrivals in proportion.

    Raises:
        UserInputError: the arrivals are recorded and have no rate_per_s.
    """
    arrivals, cluster = scenario.arrivals, scenario.cluster
    if arrivals.rate_per_s is None or arrivals.requests is None:
        raise UserInputError(
            "--workers needs arrivals.rate_per_s and arrivals.requests: set both for the trace"
        )
    ratio = workers / cluster.decode.workers
    changes: dict[str, Any] = {"decode": cluster.decode.model_copy(update={"workers": workers})}
    if cluster.prefill is not None:
        prefill = max(1, round(ratio * cluster.prefill.workers))
        changes["prefill"] = cluster.prefill.model_copy(update={"workers": prefill})
    requests = max(1, round(ratio * arrivals.requests))
    more = arrivals.model_copy(update={"rate_per_s": ratio * arrivals.rate_per_s, "requests": requests})
    return scenario.model_copy(update={"cluster": cluster.model_copy(update=changes), "arrivals": more})


def _simulate_in_parallel(
    scenario: Scenario, processes: int, by_domain: bool, on_row: Callable[[int], None]
) -> list[dict[str, Any]]:
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
        for row in waiting.map(lambda job: ray.get(task.remote(scenario, *job, by_domain=by_domain)), todo):
            rows.append(row)
            on_row(len(todo))
    return rows


def _fit_cost(source: str, out: Path) -> None:
    if source.startswith(("http://", "https://")):
        status = OperatorClient(source, os.environ.get("ELDR_ADMIN_KEY"), timeout_s=10).status()
        fitted = cost_from_status(status, source)
    else:
        fitted = fit_step_cost(Path(source))
    fitted.save(out)
    terms = ", ".join(f"{name} {1e6 * value:.3g} us" for name, value in fitted.cost.as_dict().items())
    typer.echo(f"{fitted.steps} steps: {terms}; error {fitted.rms_relative_error:.1%} rms; wrote {out}")


if __name__ == "__main__":
    run(simulate)
