"""TPOT of each policy without contention: every worker's schedule alone on one real engine.

    python -m benchmarks.decode_replay --prompts DIR

What it is: Poisson arrivals of prefilled requests are placed on K workers by the policy, in the
simulator, with the step cost that was first fitted on this engine. Then each worker's requests are
served, at their arrival times, by the real engine, one worker after the other, so that workers do not
share cores as they would if they all ran here. The times are the real engine's; what is simulated is
only who gets which request. Prompts' KV blocks are in the prefix cache, as if they had been
transferred; the experts are wide enough to leave the CPU's caches (widened demo model, same function).

`marginal-cost, true decode` is the same policy fed with the decode activations that the request will
really have: what a perfect prediction would gain.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from numpy.typing import NDArray
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from benchmarks.capture import GROUPS, MODEL, Captured, captured
from benchmarks.common import publish
from benchmarks.replay_engine import ENGINE_ENV, Arrival, ReplayEngine, Steps
from eldr_serve.artifacts import RoutingTable
from eldr_serve.fitting import fit_table
from eldr_serve.routing import Handoff, StepCost, StepSums, make_policy
from eldr_serve.simulation.decode import Job, Outcome, expert_bits, simulate
from offline.cli import BadInput, run

BASELINES = ("random", "round-robin", "shortest-queue", "power-of-two", "least-tokens")
TRUE = "marginal-cost, true decode"
POLICIES = (*BASELINES, "locality-band", "marginal-cost", TRUE)
_DRAWS = 2000


@dataclass(frozen=True)
class Case:
    """One workload on K workers: its jobs, who got which under each policy, and the result."""

    group: str
    workers: int
    requests: NDArray[np.int64]  # index into the capture, by job
    arrival_s: NDArray[np.float64]
    outcomes: dict[str, Outcome]
    tpot_s: dict[str, NDArray[np.float64]]  # measured, by policy and job
    steps: dict[str, Steps]


def decode_replay(
    prompts: Annotated[Path, typer.Option(help="Folder of JSONL prompts with domains.")],
    workers: Annotated[str, typer.Option(help="Numbers of decode workers, with commas.")] = "8,16",
    groups: Annotated[str, typer.Option(help="Workloads, of: all, language, task.")] = ",".join(GROUPS),
    policies: Annotated[str, typer.Option(help="Policies, with semicolons.")] = ";".join(POLICIES),
    per_worker: Annotated[int, typer.Option(min=4, help="Requests a worker.")] = 48,
    batch: Annotated[float, typer.Option(min=1, help="Batch size that the arrival rate aims at.")] = 16.0,
    output_tokens: Annotated[int, typer.Option(min=2, help="Tokens generated a request.")] = 64,
    intermediate: Annotated[int, typer.Option(min=32, help="Neurons an expert; 1024 are 0.98 MB.")] = 1024,
    requests: Annotated[
        int, typer.Option(min=16, help="Prompts captured, half tasks, half languages.")
    ] = 1600,
    work: Annotated[Path, typer.Option(help="Folder for the capture and the widened model.")] = Path(
        "out/bench"
    ),
    seed: Annotated[int, typer.Option(help="Seed of prompts, arrivals, policies and bootstrap.")] = 0,
    out: Annotated[Path | None, typer.Option(help="JSON file; default in benchmarks/results.")] = None,
) -> None:
    """Compare policies on K workers, each worker's schedule measured alone on one engine."""
    group, policy = groups.split(","), policies.split(";")
    for kind, given, known in (("workload", group, GROUPS), ("policy", policy, POLICIES)):
        if unknown := [name for name in given if name not in known]:
            raise BadInput(f"unknown {kind} {unknown[0]!r}; there are {', '.join(known)}")
    if not all(k.isdigit() and int(k) for k in workers.split(",")):
        raise BadInput(f"--workers is {workers!r}, it must be numbers with commas")
    data = captured(prompts, work, requests=requests, output_tokens=output_tokens, seed=seed)
    engine = ReplayEngine(str(widened(intermediate, work)))
    rng = np.random.default_rng(seed)
    cost, error = fit_cost(engine, data, rng, output_tokens)
    typer.echo(f"step cost: {cost.as_dict()}, relative error {error:.1%}")
    cases = [
        _plan(data, name, k, policy, cost, per_worker, batch, output_tokens, seed)
        for name in group
        for k in map(int, workers.split(","))
    ]
    schedule = [(case, w) for case in cases for w in range(case.workers)]
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns) as progress:
        bar = progress.add_task("replaying", total=len(schedule) * len(policy))
        for case, worker in schedule:
            for name in rng.permutation(policy):  # in turn, so that the machine's moods meet all alike
                progress.update(bar, description=f"{case.group}, K={case.workers}, worker {worker}")
                _replay(engine, data, case, worker, str(name), output_tokens)
                progress.advance(bar)
    rows = [row for case in cases for row in _rows(case, policy, seed)]
    publish(
        "decode_replay",
        rows,
        inputs={
            "intermediate": intermediate,
            "per_worker": per_worker,
            "batch": batch,
            "output_tokens": output_tokens,
            "captured": requests,
            "step_cost": cost.as_dict(),
            "step_cost_relative_error": error,
        },
        seed=seed,
        notes="placement simulated with the fitted step cost, steps measured on one real engine, one worker "
        "at a time; change against the best baseline of each percentile, 95 % interval by bootstrap over "
        "requests",
        out=out,
    )


def widened(intermediate: int, work: Path) -> Path:
    """The demo model with experts of that many neurons; made where it is not there."""
    if intermediate == 32:
        return MODEL
    path = work / f"model_{intermediate}"
    if not (path / "config.json").exists():
        work.mkdir(parents=True, exist_ok=True)
        command = [
            sys.executable,
            "-m",
            "demo_model.widen",
            "--intermediate",
            str(intermediate),
            "--out",
            str(path),
        ]
        subprocess.run(command, check=True, env=os.environ | ENGINE_ENV, stdout=subprocess.DEVNULL)
    return path


def fit_cost(
    engine: ReplayEngine, data: Captured, rng: np.random.Generator, output_tokens: int
) -> tuple[StepCost, float]:
    """Cost of this engine's steps, over batches of 1 to 40 and of one domain or many; relative error."""
    seen = Steps()
    domains = np.array(data.trace.domains)
    for name in (None, "code", "zh", None):
        pool = np.flatnonzero(domains == name) if name else np.arange(len(domains))
        if len(pool) < 2:
            pool = np.arange(len(domains))
        for size in (2, 10, 24, 40):
            chosen = rng.choice(pool, size)
            engine.warm([data.tokens[i] for i in chosen])
            gaps = rng.exponential(0.02, size)  # so that the batch fills and empties
            arrivals = [
                Arrival(f"fit{n}", float(t), data.tokens[i], output_tokens)
                for n, (i, t) in enumerate(zip(chosen, np.cumsum(gaps), strict=True))
            ]
            seen.extend(engine.run(arrivals)[1])
    sums = StepSums.of(seen.requests, seen.kv_tokens, seen.experts, seen.wall_s)
    cost = sums.fit()
    if cost is None:
        raise BadInput("the engine's steps do not depend on active experts; widen the model")
    return cost, sums.error(cost)


def _plan(
    data: Captured,
    group: str,
    workers: int,
    policies: list[str],
    cost: StepCost,
    per_worker: int,
    batch: float,
    output_tokens: int,
    seed: int,
) -> Case:
    fit, rest = data.split(group, 0.4, seed)
    rng = np.random.default_rng([seed, workers])
    table, _ = fit_table(data.subset(fit), workers, seed=seed)
    chosen = rng.choice(rest, workers * per_worker, replace=workers * per_worker > len(rest))
    bits = {
        int(i): expert_bits(data.routes(int(i))[:output_tokens], data.trace.prefill_counts.shape[2])
        for i in chosen
    }
    unions = [
        np.bitwise_or.reduce([bits[int(i)][0] for i in rng.choice(chosen, round(batch))]) for _ in range(64)
    ]
    experts = float(np.mean([np.bitwise_count(union).sum() for union in unions]))
    # Little's law: arrivals a second and worker = batch / time in the worker.
    rate = workers * batch / (output_tokens * float(cost.seconds(batch, 200 * batch, experts)))
    arrival_s = np.cumsum(rng.exponential(1 / rate, len(chosen)))
    outcomes = {
        name: _place(data, chosen, arrival_s, bits, name, workers, cost, table, output_tokens, seed)
        for name in policies
    }
    empty = {name: np.zeros(len(chosen)) for name in policies}
    return Case(group, workers, chosen, arrival_s, outcomes, empty, {name: Steps() for name in policies})


def _place(
    data: Captured,
    chosen: NDArray[np.int64],
    arrival_s: NDArray[np.float64],
    bits: dict[int, NDArray[np.uint64]],
    name: str,
    workers: int,
    cost: StepCost,
    table: RoutingTable,
    output_tokens: int,
    seed: int,
) -> Outcome:
    trace = data.trace
    policy = make_policy("marginal-cost" if name == TRUE else name).with_table(table)
    policy.follow_cost(cost)
    jobs = []
    for number, i in enumerate(chosen):
        counts, tokens = trace.prefill_counts[i], int(trace.prompt_tokens[i])
        if name == TRUE:
            counts, tokens = trace.decode_counts[i], int(trace.decode_steps[i])
        handoff = Handoff(f"r{number}", counts, tokens, output_tokens, trace.domains[i])
        jobs.append(Job(handoff, float(arrival_s[number]), bits[int(i)]))
    return simulate(jobs, policy, workers, cost, seed=seed)


def _replay(
    engine: ReplayEngine, data: Captured, case: Case, worker: int, policy: str, output_tokens: int
) -> None:
    jobs = np.flatnonzero(case.outcomes[policy].worker == worker)
    if not len(jobs):
        return
    arrivals = [
        Arrival(f"{worker}:{j}", float(case.arrival_s[j]), data.tokens[case.requests[j]], output_tokens)
        for j in jobs
    ]
    engine.warm([arrival.tokens for arrival in arrivals])
    times, steps = engine.run(arrivals)
    for j, arrival in zip(jobs, arrivals, strict=True):
        token_times = times[arrival.request_id]
        case.tpot_s[policy][j] = (token_times[-1] - token_times[0]) / (len(token_times) - 1)
    case.steps[policy].extend(steps)


def _rows(case: Case, policies: list[str], seed: int) -> list[dict[str, Any]]:
    baselines = [name for name in policies if name in BASELINES]
    rng = np.random.default_rng(seed)
    draws = rng.integers(len(case.requests), size=(_DRAWS, len(case.requests)))
    rows = []
    for name in policies:
        tpot, steps = case.tpot_s[name], case.steps[name]
        row: dict[str, Any] = {"workload": case.group, "workers": case.workers, "policy": name}
        for q in (50, 99):
            row[f"tpot_p{q}_ms"] = 1e3 * float(np.percentile(tpot, q))
            if baselines:
                best = min(baselines, key=lambda b: float(np.percentile(case.tpot_s[b], q)))
                drawn = np.percentile(tpot[draws], q, axis=1) / np.percentile(
                    case.tpot_s[best][draws], q, axis=1
                )
                low, high = np.percentile(drawn, [2.5, 97.5])
                ratio = np.percentile(tpot, q) / np.percentile(case.tpot_s[best], q)
                row[f"p{q}_change_pct"] = 100 * float(ratio - 1)
                row[f"p{q}_change_low_pct"], row[f"p{q}_change_high_pct"] = (
                    100 * float(low - 1),
                    100 * float(high - 1),
                )
        layers = 6  # of the demo model
        row |= {
            "active_experts": float(np.mean(steps.experts)) / layers,
            "batch_size": float(np.mean(steps.requests)),
            "step_ms": 1e3 * float(np.mean(steps.wall_s)),
            "simulated_tpot_p50_ms": 1e3 * float(np.percentile(case.outcomes[name].tpot_s, 50)),
            "simulated_tpot_p99_ms": 1e3 * float(np.percentile(case.outcomes[name].tpot_s, 99)),
        }
        rows.append(row)
    return rows


if __name__ == "__main__":
    run(decode_replay)
