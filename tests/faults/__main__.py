"""Inject faults into the service and check that it loses no request.

python -m tests.faults simulate --seeds 5000       run the serving code on virtual time
python -m tests.faults simulate --seed 17          repeat one run and print all its events
python -m tests.faults mutate                      change the serving code; the runs must detect it
python -m tests.faults chaos --seconds 600         kill and stop processes of the whole application
python -m tests.faults chaos --proxies 2           the same with two proxies of Ray Serve
"""

import json
import multiprocessing
import os
from collections import Counter
from collections.abc import Container
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from eldr_serve.commands.run import run
from eldr_serve.errors import UserInputError
from loadgen.progress import progress_bar
from loadgen.results import environment, print_table, write_result
from loadgen.workload import read_prompts
from tests.faults.chaos import Options, run_chaos
from tests.faults.checks import SimulatedRun
from tests.faults.mutations import MUTATIONS, search
from tests.faults.operations import FAULTS
from tests.faults.record import APART, NOTES, Record, find_problems, rows
from tests.faults.simulate import run_seed
from tests.faults.traffic import MAX_TOKENS

_Processes = Annotated[int, typer.Option(help="processes to run them in", min=1)]
_CORES = os.cpu_count() or 1


def simulate(
    *,
    seeds: Annotated[int, typer.Option(help="runs, one per seed", min=1)] = 1000,
    first: Annotated[int, typer.Option(help="the first seed")] = 0,
    seed: Annotated[int | None, typer.Option(help="run only this seed, and print all its events")] = None,
    processes: _Processes = _CORES,
    out: Annotated[
        Path | None, typer.Option(help="JSON file of the counts; these runs are added to it.")
    ] = None,
) -> None:
    """Run the serving code on virtual time under seeded faults. The status is 1 if anything was wrong."""
    if seed is None:
        failed = _simulate_all(range(first, first + seeds), processes, out)
    else:
        result = run_seed(seed)
        _print_run(result)
        failed = len(result.violations)
    if failed:
        raise typer.Exit(1)


def _print_run(result: SimulatedRun) -> None:
    """Print the events, outcomes and violations of a run."""
    console = Console(highlight=False, soft_wrap=True)
    for event in result.events:
        console.print(event, markup=False)
    for outcome in result.outcomes:
        script = outcome.script
        form = "stream" if script.stream else "unstreamed"
        what = f"{script.method}, {form}, {script.max_tokens} tokens, n={script.n}"
        timing = f"{script.at_s:.4f} s + {outcome.seconds:.4f} s by {outcome.ingress}: {outcome.kind}"
        console.print(f"{timing} ({what}) {outcome.detail}", markup=False)
    for violation in result.violations:
        console.print(f"VIOLATION {violation}", markup=False)
    console.print(
        f"seed {result.seed}: {result.virtual_s:.1f} s of virtual time, trace {result.trace & 2**64 - 1:x}"
    )


def _run(seed: int) -> tuple[int, Counter[str], int, list[str]]:
    """Run a seed and return its counts, which can be pickled."""
    result = run_seed(seed)
    return seed, result.kinds, len(result.events), result.violations


def _simulate_all(seeds: range, processes: int, out: Path | None) -> int:
    """Run all seeds and return how many fail."""
    console = Console(highlight=False, soft_wrap=True)
    kinds, faults, failed = Counter[str](), 0, 0
    with multiprocessing.get_context("fork").Pool(processes) as pool, progress_bar() as bar:
        task = bar.add_task("runs", total=len(seeds))
        for seed, kinds_of_seed, num_events, violations in pool.imap_unordered(_run, seeds, chunksize=4):
            bar.advance(task)
            kinds.update(kinds_of_seed)
            faults += num_events
            failed += bool(violations)
            if violations:
                console.print(f"seed {seed} fails; again: python -m tests.faults simulate --seed {seed}")
            for violation in violations:
                console.print(f"    {violation}", markup=False)
    print_table("what clients saw", [{"runs": len(seeds), "faults": faults, **dict(sorted(kinds.items()))}])
    console.print(f"{len(seeds)} seeds, {failed} with a violation")
    if out is not None:
        row = {"first_seed": seeds.start, "seeds": len(seeds), "violated": failed, "faults": faults}
        row["commit"] = environment()["commit"]  # later runs may be of another commit
        _add(out, "faults_simulated", row | {"kinds": dict(sorted(kinds.items()))}, "first_seed", _SIMULATED)
    return failed


_SIMULATED = (
    "a row for each run of the command, with the commit of its code; kinds: number of requests by outcome, "
    "as their clients saw it"
)
_MUTATED = (
    "each mutation with the first seed that fails with it and passes without it, and the beginning of the "
    "violation; null: no seed that was tried detects it"
)
_MAX_CHARS = 300  # characters of a recorded violation


def _add(
    out: Path, name: str, row: dict[str, Any], key: str, notes: str, *, existing: Container[str] | None = None
) -> None:
    """Add the row to the file. It replaces a row with the same key.

    Args:
        existing: keys that still exist. Rows with other keys are removed.
    """
    rows = json.loads(out.read_text())["rows"] if out.exists() else []
    if existing is not None:
        rows = [old for old in rows if old[key] in existing]
    rows = sorted([*(old for old in rows if old[key] != row[key]), row], key=lambda each: each[key])
    out.parent.mkdir(parents=True, exist_ok=True)
    write_result(out, name, rows, inputs={}, seed=0, notes=notes)


def mutate(
    *,
    only: Annotated[str, typer.Option(help="run only mutations whose name contains this text")] = "",
    seeds: Annotated[int, typer.Option(help="runs before a mutation counts as not found", min=1)] = 400,
    processes: _Processes = _CORES,
    out: Annotated[Path | None, typer.Option(help="JSON file of the results; these are added to it.")] = None,
) -> None:
    """Change the serving code at import, one fault at a time. The status is 1 if the runs miss one."""
    chosen = [mutation for mutation in MUTATIONS if only in mutation.name]
    if not chosen:
        raise UserInputError(f"no mutation's name contains {only!r}")
    console, missed = Console(highlight=False, soft_wrap=True), []
    for result in search(chosen, seeds, processes):
        by = "NOT FOUND" if result.seed is None else f"seed {result.seed}: {result.violation[:100]}"
        console.print(f"{result.mutation}: {by}", markup=False)
        if out is not None:
            violation = result.violation[:_MAX_CHARS]
            row = {"mutation": result.mutation, "seed": result.seed, "violation": violation}
            row["commit"] = environment()["commit"]
            _add(out, "faults_mutated", row, "mutation", _MUTATED, existing={m.name for m in MUTATIONS})
        if result.seed is None:
            missed.append(result.mutation)
    console.print(f"{len(chosen)} mutations of the serving code, {len(missed)} not found")
    if missed:
        raise typer.Exit(1)


def chaos(
    *,
    seconds: Annotated[float, typer.Option(help="Length of the load, s.", min=10)] = 600.0,
    every: Annotated[float, typer.Option(help="Time from one fault to the next, s.", min=1)] = 20.0,
    in_flight: Annotated[int, typer.Option(help="Requests at a time.", min=1)] = 10,
    faults: Annotated[str, typer.Option(help="Kinds, separated by commas; default: all.")] = ",".join(FAULTS),
    deployment: Annotated[
        Path, typer.Option(help="Deployment YAML; its engines run on this machine.")
    ] = Path("deployments/cpu_demo.yaml"),
    prompts: Annotated[Path, typer.Option(help="JSONL file or folder of prompts.")] = Path(
        "examples/demo_model/prompts"
    ),
    blocks: Annotated[int, typer.Option(help="KV blocks of an engine; few, so that they are reused.")] = 64,
    proxies: Annotated[
        int, typer.Option(help="Serve's proxies, each on a Ray node of its own.", min=1, max=2)
    ] = 1,
    max_tokens: Annotated[int, typer.Option(help="Most tokens of an answer.", min=8)] = MAX_TOKENS,
    port: Annotated[int, typer.Option(help="HTTP port; Serve's proxies get the next one.")] = 8300,
    seed: Annotated[int, typer.Option(help="Seed of faults, clients and prompts.")] = 0,
    out: Annotated[
        Path, typer.Option(help="JSON file of the figures; runs append their events to a .jsonl beside it.")
    ] = Path("out/faults.json"),
) -> None:
    """Kill and stop processes in turn. The status is 1 if a request fails or a text is wrong."""
    chosen = faults.split(",")
    if unknown := set(chosen) - set(FAULTS):
        raise UserInputError(f"there is no fault {min(unknown)!r}; there are {', '.join(FAULTS)}")
    record = Record(out.with_suffix(".jsonl"))
    if any(run.get("proxies", 1) != proxies for run in record.entries("run")):
        raise UserInputError(f"--out {out} has runs with another number of proxies: give another file")
    seed += len(record.entries("run"))
    options = Options(chosen, seconds, every, in_flight, blocks, port, seed, proxies, max_tokens)
    try:
        run_chaos(deployment, read_prompts([prompts]), record, options)
    finally:
        inputs = {"deployment": deployment.name, "every_s": every, "in_flight": in_flight, "blocks": blocks}
        inputs |= {"proxies": proxies, "max_tokens": max_tokens}
        table = rows(record)
        write_result(out, "faults", table, inputs=inputs, seed=seed, notes=NOTES)
    processes = table[-1]["processes"]
    print_table("faults", [{name: row[name] for name in table[0]} for row in table])
    print_table("processes", processes)
    for one in record.entries("sent"):
        if one["kind"] not in ("ok", "left", *APART):
            print(f"{one['kind']} after {one['fault']}: {one['detail'][:200]}")
    problems = find_problems(record)
    for problem in problems:
        print(problem)
    if problems:
        raise typer.Exit(1)


if __name__ == "__main__":
    run(simulate, mutate, chaos)
