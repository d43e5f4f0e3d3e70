"""DIRECTOR's forecast of the pending requests (V-A) beside ours, over windows of observed requests.

In each window GPUs decode a batch: a new one (batch by batch), or a new one together with the previous one,
which decodes on (continuous batching). The paper forecasts from the requests that wait, ours from all that
decode or wait, after their prefill.

The paper's predictors are simulated by their accuracy. That share of a request's choices is right; the
others are spread over the experts as choices of the fitted half are. A predictor has no other bias here.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.papers.figures import shifting
from benchmarks.papers.figures.common import (
    Options,
    PaperFigure,
    Rows,
    bar_plot,
    change_pct,
    each_seed,
    mean,
    summarise_runs,
)
from benchmarks.papers.figures.director import read_traces
from benchmarks.papers.figures.director_forms import Measures, max_over_mean
from benchmarks.papers.figures.shifting import Batch, GpuCluster
from eldr_serve.arrays import Floats
from eldr_serve.experts.calibration_trace import CalibrationTrace

GPUS = 8
WINDOWS = 8
CONTINUOUS = "continuous batching"
SERVICES = ("batch by batch", CONTINUOUS)
ACCURACY = {"cascade": 0.845, "quantized replica": 0.938}  # Table II, mean of the paper's four models

# Forecasts tokens [L, G, E] of a step from the batches that decode and the batch that waits.
WindowForecast = Callable[[list[Batch], Batch], Floats]


def forecasts(options: Options) -> Rows:
    """Compare the forecasts, and the placements for them, with the true workload of each window."""
    traces = read_traces(options)

    def run(case: tuple[Path, str], seed: int) -> dict[str, Measures]:
        return _measure_windows(traces[case[0]], case[1], seed)

    rows: Rows = []
    for (path, service), runs in each_seed(options, product(traces, SERVICES), run):
        for name in runs[0]:
            row: dict[str, Any] = {"trace": traces[path].model, "service": service, "forecast": name}
            rows.append(row | summarise_runs([measures[name] for measures in runs]))
    return rows


def predicted_counts(counts: NDArray[np.uint32], popularity: Floats, accuracy: float) -> Floats:
    """Return counts [N, L, E] of which the share `accuracy` is right.

    Args:
        counts: [N, L, E], the true counts.
        popularity: [L, E], choices of each expert in past requests, which the wrong choices follow.
    """
    share = popularity / popularity.sum(axis=1, keepdims=True)
    wrong = (1 - accuracy) * counts.sum(axis=2, keepdims=True) * share
    predicted: Floats = accuracy * counts + wrong
    return predicted


def _window_forecasts(trace: CalibrationTrace, fit: NDArray[np.int64]) -> dict[str, WindowForecast]:
    """Return the forecasts by name. `fit` are past requests."""

    def paper(counts: NDArray[np.uint32], tokens: NDArray[np.uint32], accuracy: float) -> WindowForecast:
        popularity = counts[fit].sum(axis=0, dtype=np.float64)
        forecast = shifting.counted_forecast(predicted_counts(counts, popularity, accuracy), tokens)
        # Batches have equally many requests, so the waiting one stands for all.
        return lambda decoding, waiting: (len(decoding) + 1) * forecast(waiting)

    def ours(counts: NDArray[np.generic]) -> WindowForecast:
        forecast = shifting.counted_forecast(counts, trace.prompt_tokens)
        return lambda decoding, waiting: _sum([forecast(batch) for batch in (*decoding, waiting)])

    prompts = trace.prefill_counts, trace.prompt_tokens
    answers = trace.decode_counts, trace.decode_steps
    return {
        **{f"paper, {name}": paper(*prompts, accuracy) for name, accuracy in ACCURACY.items()},
        "paper, replica that knows the answers": paper(*answers, ACCURACY["quantized replica"]),
        "paper, without errors": paper(*prompts, 1.0),
        "ours": ours(trace.prefill_counts),
        "ours, corrected": ours(trace.prefill_counts * shifting.correction(trace, fit)),
        "true workload": _true_workload,
    }


def _true_workload(decoding: list[Batch], waiting: Batch) -> Floats:
    return _sum([batch.workload for batch in (*decoding, waiting)])


def _sum(workloads: list[Floats]) -> Floats:
    total: Floats = np.sum(workloads, axis=0)
    return total


def _measure_windows(trace: CalibrationTrace, service: str, seed: int) -> dict[str, Measures]:
    """Return the measures of each forecast, their means over the windows."""
    fit, measured = shifting.split(trace, seed)
    cluster = GpuCluster.from_name("H200", GPUS, trace.prefill_counts.shape[2])
    batches = shifting.shifting_batches(trace, measured, WINDOWS + 1, GPUS, seed)
    forecast_of = _window_forecasts(trace, fit)
    measures: dict[str, list[Measures]] = {name: [] for name in forecast_of}
    for before, waiting in pairwise(batches):
        decoding = [before] if service == CONTINUOUS else []
        true = _true_workload(decoding, waiting)
        least_s = float(cluster.step_s(true, cluster.place(true)).sum())
        for name, forecast in forecast_of.items():
            measures[name].append(_measure(cluster, forecast(decoding, waiting), true, least_s))
    return {name: mean(of_windows) for name, of_windows in measures.items()}


def _measure(cluster: GpuCluster, expected: Floats, true: Floats, least_s: float) -> Measures:
    """Return the error of a forecast, and load and time of the true workload under the placement for it.

    Args:
        expected, true: tokens [L, G, E].
        least_s: time of the placement for the true workload.
    """
    placement = cluster.place(expected)
    share, true_share = (
        tokens / tokens.sum(axis=1, keepdims=True) for tokens in (expected.sum(axis=1), true.sum(axis=1))
    )
    return {
        "wrong_expert_pct": 50 * float(abs(share - true_share).sum(axis=1).mean()),
        "load_max_over_mean": max_over_mean(cluster.work(true, placement).tokens),
        "above_true_pct": change_pct(float(cluster.step_s(true, placement).sum()), least_s),
    }


FIGURES = {
    "forecast": PaperFigure(
        "Forecast of the pending requests (V-A) beside ours: error, and the placement for it, 8 GPUs",
        "cascades are right in 77 to 91 % of the choices, quantized replicas in 91 to 96 % (Table II)",
        forecasts,
        bar_plot("forecast", "wrong_expert_pct", ("trace", "service")),
    ),
}
