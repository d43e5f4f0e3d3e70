"""Compare routing policies on engines that keep running.

    python -m loadgen.compare --host http://127.0.0.1:8000 --policies shortest-queue,locality-band:band=0.1 \\
        --prompts prompts/ --rate 4 --trial-seconds 60 --rounds 4 --out out/compare

Policies take turns in trials of load, in an order drawn for each round. All policies of a round get the
same requests at the same times, so that only the policy differs. A run that was stopped resumes when it is
called again with the same settings. At the end the server's own policy is restored.

With `--rate` the load is an open loop, with `--in-flight` a closed one. On engines that share cores, an
open loop amplifies each difference into a longer queue, while a closed loop keeps batch sizes equal.
Without either option the load is a closed loop with enough requests for each decode worker to form batches.
"""

from __future__ import annotations

import hashlib
import math
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, astuple, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from eldr_serve.commands.client import OperatorClient
from eldr_serve.commands.run import run
from eldr_serve.data_root import ROOT
from eldr_serve.errors import UserInputError
from eldr_serve.files import write_atomically
from loadgen.figures import describe_intervals, policy_rows, tpot_by_domain
from loadgen.journal import Journal
from loadgen.load import LATE_S, describe_run
from loadgen.report import figures_table, html_report
from loadgen.results import environment, print_table, write_result
from loadgen.sentences import client_sentences, step_sentences
from loadgen.statistics import LatencyObjective
from loadgen.trial import (
    JOURNAL,
    RESTORE,
    LoadSpec,
    ScheduledTrial,
    Trial,
    parse_policy,
    run_trial,
    schedule_trials,
)
from loadgen.workload import read_prompts

_SCHEMA = "eldr-compare/8"  # version of the journal's format
_PER_WORKER = 8  # requests in flight per decode worker, by default


Policies = Annotated[str, typer.Option(help="Policies, comma-separated; parameters: name:parameter=value.")]
InFlight = Annotated[
    int | None,
    typer.Option(
        help="Closed loop: constant number of requests in flight.",
        show_default=f"{_PER_WORKER} a decode worker, if --rate is not given",
    ),
]
Prompts = Annotated[
    Path,
    typer.Option(
        help="JSONL file or folder: prompts with domains, or a log of OpenAI requests.",
        show_default="the demo model's",
    ),
]
BurnIn = Annotated[
    int, typer.Option(help="Load before the first trial, for engines that have just started, s.")
]
MinTokens = Annotated[
    int, typer.Option(help="Draw output tokens from this to --max-tokens; 0: always --max-tokens.")
]
Model = Annotated[str | None, typer.Option(help="Model id to request.", show_default="the first one served")]
KeyVariable = Annotated[str, typer.Option(help="Environment variable with the admin key.")]
Out = Annotated[Path, typer.Option(help="Folder for trials, compare.json and report.html.")]


def compare(
    policies: Policies,
    rate: Annotated[float | None, typer.Option(help="Open loop: requests/s, Poisson arrivals.")] = None,
    in_flight: InFlight = None,
    host: Annotated[str, typer.Option(help="URL of the service.")] = "http://127.0.0.1:8000",
    prompts: Prompts = ROOT / "examples/demo_model/prompts",
    trial_seconds: Annotated[int, typer.Option(help="Measured part of a trial, s.")] = 60,
    warm_up_seconds: Annotated[int, typer.Option(help="Load before the measured part, s.")] = 10,
    burn_in_seconds: BurnIn = 0,
    rounds: Annotated[int, typer.Option(help="Trials of each policy.")] = 4,
    users: Annotated[int, typer.Option(help="Open loop: maximum requests in flight.")] = 256,
    max_tokens: Annotated[int, typer.Option(help="Maximum output tokens of a request.")] = 64,
    min_tokens: MinTokens = 0,
    temperature: Annotated[float, typer.Option(help="Sampling temperature.")] = 0.8,
    model: Model = None,
    slo_ttft_ms: Annotated[float, typer.Option(help="Objective of goodput: TTFT, ms.")] = 1000.0,
    slo_tpot_ms: Annotated[float, typer.Option(help="Objective of goodput: TPOT, ms.")] = 100.0,
    admin_key_env: KeyVariable = "ELDR_ADMIN_KEY",
    out: Out = Path("out/compare"),
    seed: Annotated[int, typer.Option(help="Seed of prompts, arrivals, order and bootstrap.")] = 0,
) -> None:
    """Compare policies under the same load. The same settings resume a stopped run."""
    names = [name.strip() for name in policies.split(",") if name.strip()]
    service = OperatorClient(host, os.environ.get(admin_key_env, ""))
    requests_per_s, users = _loop(rate, in_flight, users, service)
    load = LoadSpec(
        str(prompts),
        model or service.model(),
        requests_per_s,
        trial_seconds,
        warm_up_seconds,
        users,
        max_tokens,
        temperature,
        min_tokens,
    )
    settings = _settings(names, load, rounds, burn_in_seconds, seed, host, prompts)
    if out.exists() and any(out.iterdir()) and not (out / JOURNAL).exists():
        raise UserInputError(f"{out} is not empty and has no comparison of this version: give another --out")
    journal = Journal(out / JOURNAL, settings)
    scheduled = schedule_trials(names, rounds, seed)
    console = Console(soft_wrap=True)
    if unfinished := [planned for planned in scheduled if planned.key not in journal.entries]:
        if rate is None and in_flight is None:
            console.print(f"closed loop of {users} requests in flight; change it with --in-flight or --rate")
        try:
            with _restore_policy_at_end(service, journal, names):
                if burn_in_seconds:
                    console.print(f"burn-in: {burn_in_seconds} s of load that is not measured")
                    first = replace(unfinished[0], seed=seed)
                    run_trial(service, first, replace(load, seconds=burn_in_seconds), scratch=out)
                _measure(service, journal, unfinished, load, console, scratch=out)
        except KeyboardInterrupt:
            console.print(f"stopped; the same command resumes from the trials in {out}")
            raise typer.Exit(130) from None
    objective = LatencyObjective(slo_ttft_ms, slo_tpot_ms)
    trials = [Trial(**journal.get(planned.key)) for planned in scheduled]
    all_answered = _publish(console, out, names, trials, load, objective, settings, seed)
    if not all_answered:
        raise typer.Exit(1)


def _loop(
    rate: float | None, in_flight: int | None, users: int, service: OperatorClient
) -> tuple[float, int]:
    """Return requests/s and users of the loop."""
    if rate is not None and in_flight is not None:
        raise UserInputError("give either --rate, for an open loop, or --in-flight, for a closed one")
    if rate is None and in_flight is None:
        return 0.0, _PER_WORKER * max(1, service.num_workers())
    if in_flight is not None:
        if in_flight < 1:
            raise UserInputError(f"--in-flight must be at least 1, got {in_flight}")
        return 0.0, in_flight
    if not (rate is not None and math.isfinite(rate) and rate > 0):
        raise UserInputError(f"--rate must be above 0 requests/s, got {rate}")
    return rate, users


def _settings(
    names: list[str], load: LoadSpec, rounds: int, burn_in_s: int, seed: int, host: str, prompts: Path
) -> dict[str, Any]:
    """Return everything that the figures depend on. Raise UserInputError for an unusable value."""
    for option, value, minimum in (
        ("--trial-seconds", load.seconds, 1),
        ("--warm-up-seconds", load.warm_up_s, 0),
        ("--burn-in-seconds", burn_in_s, 0),
        ("--rounds", rounds, 1),
        ("--users", load.users, 1),
        ("--max-tokens", load.max_tokens, max(1, load.min_tokens)),
        ("--min-tokens", load.min_tokens, 0),
        ("--seed", seed, 0),
    ):
        if value < minimum:
            raise UserInputError(f"{option} must be at least {minimum}, got {value}")
    if not names:
        raise UserInputError("--policies is empty: name at least one policy")
    for name in names:
        if names.count(name) > 1:
            raise UserInputError(f"--policies names {name} more than once: name each policy once")
        parse_policy(name)
    texts = "\0".join(repr(astuple(prompt)) for prompt in read_prompts([prompts]))
    return asdict(load) | {
        "schema": _SCHEMA,
        "policies": names,
        "rounds": rounds,
        "burn_in_s": burn_in_s,
        "seed": seed,
        "host": host,
        "prompts_sha256": hashlib.sha256(texts.encode()).hexdigest(),
    }


@contextmanager
def _restore_policy_at_end(service: OperatorClient, journal: Journal, names: list[str]) -> Iterator[None]:
    """Check that the server accepts every policy. At the end, even after errors, restore its own."""
    status = service.status()
    # After a run that was killed, the server's current policy is not its own.
    policy = journal.get(RESTORE) or {"name": status["policy"], "parameters": status["parameters"]}
    previous_handler = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        service.set_policy(**policy)  # this fails before any change if the key is refused
        try:
            for name in names:
                service.set_policy(*parse_policy(name))
            journal.put(RESTORE, policy)
            yield
        finally:
            service.set_policy(**policy)
            if journal.get(RESTORE):
                journal.put(RESTORE, None)
    finally:
        signal.signal(signal.SIGTERM, previous_handler)


def _measure(
    service: OperatorClient,
    journal: Journal,
    scheduled: list[ScheduledTrial],
    load: LoadSpec,
    console: Console,
    scratch: Path,
) -> None:
    load_s = load.warm_up_s + load.seconds
    start = time.perf_counter()
    console.print(f"{len(scheduled)} trials to measure, at least {len(scheduled) * load_s / 60:.1f} min")
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        bar = progress.add_task("", total=len(scheduled) * load_s)
        for number, planned in enumerate(scheduled):
            progress.update(bar, description=f"{planned.policy}, round {planned.round + 1}")

            def tick(elapsed_s: float, first_s: float = number * load_s) -> None:
                progress.update(bar, completed=first_s + min(elapsed_s, load_s))

            trial = run_trial(service, planned, load, scratch=scratch, tick=tick)
            journal.put(planned.key, asdict(trial))
            left_s = (time.perf_counter() - start) / (number + 1) * (len(scheduled) - number - 1)
            failed = sum("error" in record for record in trial.requests)
            progress.console.print(
                f"round {planned.round + 1}, {planned.policy}: {len(trial.requests)} requests, {failed} "
                f"failed; about {left_s / 60:.1f} min left"
            )


def _publish(
    console: Console,
    out: Path,
    names: list[str],
    trials: list[Trial],
    load: LoadSpec,
    objective: LatencyObjective,
    settings: dict[str, Any],
    seed: int,
) -> bool:
    """Print and write the figures. Return False if requests failed."""
    measured = {"warm_up_s": load.warm_up_s, "seconds": load.seconds}
    rows = policy_rows(names, trials, **measured, objective=objective, seed=seed)
    for row in rows:
        row["domains"] = tpot_by_domain(row["policy"], trials, **measured)
    failures = sum(row["failures"] for row in rows)
    sentences, remarks = step_sentences(rows), client_sentences(rows, settings["rounds"])
    line, bad = _verdict(trials, failures)
    for text in [line, *sentences, *remarks] if bad else [*sentences, *remarks, line]:
        console.print(text, style="bold red" if bad and text is line else "bold", markup=False)
    notes = (
        f"{describe_intervals(settings['rounds'])}; requests of a round are paired between policies; experts "
        "and batch size are means over the decode steps of the measured parts; step time per token is the "
        "time of all these steps over their tokens (on CPUs the CPU time of the engine's thread, which "
        "excludes other processes on the core); end is the time to the last token"
    )
    print_table(
        "value [95 % interval], change against the best load balancer [its interval]",
        figures_table(rows),
        lines=True,
    )
    inputs = settings | {"slo_ttft_ms": objective.ttft_ms, "slo_tpot_ms": objective.tpot_ms}
    write_result(out / "compare.json", "compare", rows, inputs=inputs, seed=seed, notes=notes)
    report = html_report(
        rows,
        trials,
        sentences=sentences,
        remarks=remarks,
        verdict=line,
        bad=bad,
        notes=notes,
        settings=inputs | environment(),
        warm_up_s=load.warm_up_s,
        seconds=load.seconds,
    )
    write_atomically(out / "report.html", report)
    console.print(f"report: {out / 'report.html'}; figures: {out / 'compare.json'}")
    return not failures


def _verdict(trials: list[Trial], failures: int) -> tuple[str, bool]:
    """Return the verdict on the run, and whether the figures are unreliable."""
    records = [record for trial in trials for record in trial.requests]
    late = [r["late_s"] for r in records if r["late_s"] is not None]
    late_s = float(np.quantile(late, 0.99)) if late else None
    foreign = sum(
        r.get("policy") not in (None, parse_policy(trial.policy)[0])
        for trial in trials
        for r in trial.requests
    )
    line = describe_run(requests=len(records), failed=failures, late_p99_s=late_s)
    if foreign:
        line += f", {foreign} PLACED BY ANOTHER POLICY than the trial's"
    return line, bool(failures or foreign or not records or (late_s or 0) > LATE_S)


if __name__ == "__main__":
    run(compare)
