"""The commands of benchmarks that replay: common options, the replay, and a report."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from benchmarks.lib import options
from benchmarks.lib.engine_pool import EnginePool
from benchmarks.lib.engines import check_device
from benchmarks.lib.replay.rows import arm_rows
from benchmarks.lib.replay.schedule import (
    FIT_REQUESTS,
    Arm,
    ReplayCase,
    ReplayExperiment,
    parse_loads,
    widen_model,
)
from eldr_serve.errors import UserInputError
from eldr_serve.files import write_atomically
from loadgen.journal import Journal
from loadgen.plots import bars
from loadgen.results import environment, publish


@dataclass(frozen=True)
class ReplayResult:
    """The cases that a replay benchmark has measured, from which a report is made."""

    name: str
    experiment: ReplayExperiment
    cases: list[ReplayCase]
    inputs: dict[str, Any]
    seed: int
    out: Path | None


Rows = list[dict[str, Any]]


def _draw_changes(rows: Rows, path: Path) -> None:
    bars(rows, "arm", "p50_change_pct", path, interval=("p50_low_pct", "p50_high_pct"))


def select_arms(names: str, arms: Sequence[Arm]) -> list[Arm]:
    """Return the arms with these labels, separated by commas, or all."""
    by_label = {arm.label: arm for arm in arms}
    labels = list(by_label) if names == "all" else names.split(",")
    if unknown := [label for label in labels if label not in by_label]:
        raise UserInputError(f"--arms names {unknown[0]!r}; there are {', '.join(by_label)}")
    return [by_label[label] for label in labels]


def report_changes(
    baselines: Sequence[str],
    note: Callable[[Rows], str] | None = None,
    draw: Callable[[Rows, Path], None] = _draw_changes,
) -> Callable[[ReplayResult], None]:
    """Return a report of changes against the best of `baselines` that ran. `note` adds a remark."""

    def report(result: ReplayResult) -> None:
        labels = list(result.cases[0].outcomes)
        baselines_of_run = [label for label in baselines if label in labels] or labels[:1]
        rows = [row for case in result.cases for row in arm_rows(case, baselines_of_run, result.seed)]
        alone = "on its own core" if result.inputs["device"] == "cpu" else "alone on the GPU"
        notes = (
            f"Requests are placed in simulation, and steps measured on real engines, each {alone}. "
            f"Changes are against the best of {', '.join(baselines_of_run)} at that percentile, with 95 % "
            "bootstrap intervals"
        )
        notes += f"; {note(rows)}" if note is not None else ""
        path = publish(result.name, rows, inputs=result.inputs, seed=result.seed, out=result.out, notes=notes)
        draw(rows, path.with_suffix(".png"))

    return report


def make_replay_command(
    name: str,
    all_arms: Sequence[Arm],
    report: Callable[[ReplayResult], None] | None = None,
    *,
    default_workers: str = "8",
    default_groups: str = "language,task",
    default_batch: str = "16",
    default_per_worker: int = 40,
    default_repeats: int = 1,
    default_intermediate: int = 1024,
) -> Callable[..., None]:
    """Return the command `name` with these arms and `report`, by default changes against round-robin."""

    def command(
        prompts: options.Prompts = options.PROMPTS,
        arms: Annotated[str, typer.Option(help="Labels of settings to replay, comma-separated.")] = "all",
        workers: options.Workers = default_workers,
        groups: options.Groups = default_groups,
        per_worker: options.PerWorker = default_per_worker,
        batch: options.Batch = default_batch,
        output_tokens: options.Output = 64,
        intermediate: options.Intermediate = default_intermediate,
        requests: options.CapturedRequests = 2400,
        fit_requests: options.FitRequests = FIT_REQUESTS,
        work: options.Work = options.WORK,
        repeats: options.Repeats = default_repeats,
        engines: options.Engines = 1,
        device: options.Device = "cpu",
        seed: options.Seed = 0,
        steps_out: options.StepsOut = None,
        out: options.Out = None,
    ) -> None:
        """Place requests in each arm and replay each worker's schedule. The same options resume a run."""
        check_device(device)
        loads = parse_loads(groups, workers, batch, per_worker)
        selected_arms = select_arms(arms, all_arms)
        arguments: dict[str, Any] = {"requests": requests, "output_tokens": output_tokens, "device": device}
        arguments |= {"intermediate": intermediate, "seed": seed, "fit_requests": fit_requests}
        settings = arguments | {"benchmark": name, "arms": [*map(asdict, selected_arms)]}
        settings |= {"loads": [*map(asdict, loads)], "prompts": str(prompts)}
        settings |= {"repeats": repeats, "engines": engines}
        journal = Journal(work / f"{name}.jsonl", settings | environment())
        with EnginePool(widen_model(intermediate, work), engines, device) as engine_pool:
            experiment = ReplayExperiment(
                prompts, engine_pool=engine_pool, work=work, journal=journal, **arguments
            )
            cases = experiment.compare(loads, selected_arms, repeats)
        slowdown = np.concatenate([steps.slowdown for case in cases for steps in case.steps.values()])
        inputs = experiment.inputs | {"per_worker": per_worker, "batch": batch, "repeats": repeats}
        inputs |= {"engines": engines}
        inputs["core_slowdown_p1_p50_p99"] = np.percentile(slowdown, [1, 50, 99]).tolist()
        (report or report_changes(["round-robin"]))(ReplayResult(name, experiment, cases, inputs, seed, out))
        if steps_out is not None:
            write_atomically(steps_out, experiment.step_lines())
        journal.remove()

    command.__name__ = name
    return command
