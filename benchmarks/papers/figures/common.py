"""The definition of a reproduced figure, and the options that all figures share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from benchmarks.lib.active_experts import active_experts
from eldr_serve.errors import UserInputError
from eldr_serve.experts.calibration_trace import CalibrationTrace
from eldr_serve.scheduling import StepCost
from loadgen.plots import bars, lines
from loadgen.progress import progress_bar
from offline.simulation.requests import Experts, Requests

BATCH = 16  # mean requests of a worker that `requests_at_batch` aims at
Rows = list[dict[str, Any]]
Plot = Callable[[Rows, Path], None]
Case = TypeVar("Case")
Result = TypeVar("Result")


@dataclass(frozen=True)
class Options:
    """Options of the command. Without `cost` or `requests`, each figure uses its own value."""

    traces: tuple[Path, ...] = ()
    cost: StepCost | None = None
    requests: int | None = None
    seeds: tuple[int, ...] = (0,)

    def trace(self, what: str) -> Path:
        """Return the single trace. Otherwise raise UserInputError that says `what` it must be."""
        if len(self.traces) != 1:
            raise UserInputError(f"give one --trace: {what}")
        return self.traces[0]

    def all_traces(self, what: str) -> tuple[Path, ...]:
        """Return the traces. Raise UserInputError that says `what` they must be if there are none."""
        if not self.traces:
            raise UserInputError(f"give --trace: {what}")
        return self.traces

    def two_traces(self) -> tuple[Path, Path]:
        """Return the files of routes and of arrivals. Raise UserInputError unless two are given."""
        if len(self.traces) != 2:
            raise UserInputError(
                "give two --trace: routes (a calibration trace or published routes), then arrivals"
            )
        return self.traces[0], self.traces[1]


@dataclass(frozen=True)
class PaperFigure:
    """One figure or table. `paper` is the paper's result, in words or numbers."""

    title: str
    paper: str
    run: Callable[[Options], Rows]
    plot: Plot | None = None


def own_figure(title: str, run: Callable[[Options], Rows], plot: Plot) -> PaperFigure:
    """Return a figure that is not in the papers."""
    return PaperFigure(title, "not in the papers", run, plot)


def with_progress(cases: Iterable[Case]) -> Iterator[Case]:
    """Yield the cases under a progress bar that shows the current one."""
    all_cases = list(cases)
    with progress_bar() as progress:
        bar = progress.add_task("", total=len(all_cases))
        for case in all_cases:
            parts = case if isinstance(case, tuple) else (case,)
            words = (part.name if isinstance(part, Path) else str(part) for part in parts)
            progress.update(bar, description=", ".join(words))
            yield case
            progress.advance(bar)


def each_seed(
    options: Options, cases: Iterable[Case], run: Callable[[Case, int], Result]
) -> Iterator[tuple[Case, list[Result]]]:
    """Yield each case with the results of `run` for each seed."""
    results: list[Result] = []
    for case in with_progress(case for case in cases for _ in options.seeds):
        results.append(run(case, options.seeds[len(results)]))
        if len(results) == len(options.seeds):
            yield case, results
            results = []


def mean(summaries: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the means of the numbers that all summaries have."""
    return {
        key: float(np.mean([s[key] for s in summaries]))
        for key, value in summaries[0].items()
        if isinstance(value, int | float)
    }


def requests_at_batch(
    trace: CalibrationTrace,
    experts: Experts,
    kinds: NDArray[np.int64],
    workers: int,
    cost: StepCost,
    rng: np.random.Generator,
) -> Requests:
    """Return Poisson arrivals of these requests of the trace, in this order, for a mean batch of BATCH."""
    output = trace.decode_steps[kinds].astype(np.int64)
    active = active_experts(experts, kinds, BATCH, rng)
    # Little's law: arrivals per second and worker = batch / time in the worker.
    stay_s = float(output.mean() * cost.seconds(BATCH, BATCH * float(trace.prompt_tokens.mean()), active))
    arrival_s = np.cumsum(rng.exponential(stay_s / (workers * BATCH), len(kinds)))
    return Requests(arrival_s, trace.prompt_tokens[kinds].astype(np.int64), output, kinds)


def summarise_seeds(key: str, values: Sequence[float]) -> dict[str, float]:
    """Return the mean, the lowest and the highest value."""
    return {key: float(np.mean(values)), f"{key}_lowest": min(values), f"{key}_highest": max(values)}


def summarise_runs(runs: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the mean, the lowest and the highest value of each measure; a run has all measures of a seed."""
    summaries = (summarise_seeds(key, [run[key] for run in runs]) for key in runs[0])
    return {name: value for summary in summaries for name, value in summary.items()}


def change_pct(value: float, reference: float) -> float:
    """Return how far the value is above the reference, in percent."""
    return 100 * (value / reference - 1)


def bar_plot(label: str, value: str, panels: Sequence[str] = ()) -> Plot:
    """Return a plot of bars of `value` by `label`, a format of columns, a panel per value of `panels`."""

    def name_of(row: dict[str, Any]) -> str:
        return label.format(**row) if "{" in label else str(row[label])

    return lambda rows, path: bars(
        [row | {"label": name_of(row)} for row in _add_panel_names(rows, panels)], "label", value, path
    )


def line_plot(x: str, *values: str, by: str | None = None, panels: Sequence[str] = ()) -> Plot:
    """Return a plot of the values over x, or of one value by `by`, with one panel per value of `panels`."""
    return lambda rows, path: lines(_add_panel_names(rows, panels), x, values, path, by=by)


def _add_panel_names(rows: Rows, panels: Sequence[str]) -> Rows:
    if not panels:
        return rows
    return [
        {k: v for k, v in row.items() if k != "workers"}
        | {"workload": ", ".join(str(row[key]) for key in panels if key in row)}
        for row in rows
    ]
