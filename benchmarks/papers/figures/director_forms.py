"""DIRECTOR's Algorithm 1 as written beside our placement, for the same workload of each instance.

The LP of Algorithm 1 has layers x ranks x experts variables, so an instance has few layers of a model.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from benchmarks.papers.figures import shifting
from benchmarks.papers.figures.common import (
    Options,
    PaperFigure,
    Rows,
    bar_plot,
    change_pct,
    each_seed,
    summarise_runs,
)
from benchmarks.papers.figures.director import RANKS, read_traces, solver_arguments, synthetic_case
from benchmarks.papers.figures.shifting import TOKEN_BYTES, GpuCluster
from eldr_serve.arrays import Floats, Ints
from eldr_serve.experts.calibration_trace import CalibrationTrace
from offline.expert_placement.director import director_placement
from offline.expert_placement.director_paper import (
    DirectorPaperReport,
    director_paper_placement,
    two_maxima_s,
)

LAYERS = 4  # layers of an instance, spread over the model, if its LP has no more than MAX_VARIABLES
MAX_VARIABLES = 2048
GPUS = (4, 8)
SPARE_SLOTS = (0, 1)  # of each rank, beyond those that one replica of each expert needs
SYNTHETIC = "synthetic"
_TOLERANCE_PCT = 1e-4  # of the LP solver

Measures = dict[str, float]


def forms(options: Options) -> Rows:
    """Compare both forms on a batch of each trace and seed, and on synthetic loads of 128 experts."""
    traces = read_traces(options)
    workloads: list[Path | str] = [*traces, SYNTHETIC]
    cases: list[tuple[Path | str, int, int]] = [
        *product(traces, GPUS, SPARE_SLOTS),
        *product(workloads, (RANKS,), (1,)),
    ]

    def run(case: tuple[Path | str, int, int], seed: int) -> tuple[dict[str, Any], dict[str, Measures]]:
        path, gpus, spare = case
        trace = traces[path] if isinstance(path, Path) else None
        cluster, workload = _instance(trace, gpus, spare, seed)
        layers, _, experts = workload.shape
        label = {"workload": SYNTHETIC if trace is None else trace.model, "gpus": gpus, "spare_slots": spare}
        return label | {"experts": experts, "layers": layers}, measure_forms(cluster, workload, seed)

    rows: Rows = []
    for _, runs in each_seed(options, cases, run):
        rows += _rows_of_case(runs[0][0], [measures for _, measures in runs])
    return rows


def measure_forms(cluster: GpuCluster, workload: Floats, seed: int) -> dict[str, Measures]:
    """Place the workload [L, G, E] by both forms, and return the measures of each."""
    arguments = solver_arguments(cluster) | {"seed": seed}
    started_at_s = perf_counter()
    ours, _ = director_placement(workload, **arguments)
    ours_ended_at_s = perf_counter()
    theirs, report = director_paper_placement(workload, **arguments, on_solve=_show_solve)
    ended_at_s = perf_counter()
    return {
        "ours": _measure(cluster, workload, ours, report) | {"solve_s": ours_ended_at_s - started_at_s},
        "Algorithm 1": _measure(cluster, workload, theirs, report)
        | {"solve_s": ended_at_s - ours_ended_at_s},
    }


def max_over_mean(tokens: Floats) -> float:
    """Return the largest load over the mean load of tokens [L, G], the mean over layers."""
    return float((tokens.max(axis=1) / tokens.mean(axis=1)).mean())


def _instance(trace: CalibrationTrace | None, gpus: int, spare: int, seed: int) -> tuple[GpuCluster, Floats]:
    """Return H200 GPUs and the workload [L, G, E] of a batch; without a trace, of synthetic loads."""
    if trace is None:
        _, cluster, (workload, *_), _ = synthetic_case(seed, gpus)
    else:
        cluster = GpuCluster.from_name("H200", gpus, trace.prefill_counts.shape[2])
        _, measured = shifting.split(trace, seed)
        (batch,) = shifting.shifting_batches(trace, measured, 1, gpus, seed)
        workload = batch.workload
    layers, _, experts = workload.shape
    number = min(LAYERS, max(1, MAX_VARIABLES // (gpus * experts)))
    chosen = np.unique(np.linspace(0, layers - 1, number).astype(np.int64))
    return replace(cluster, slots=-(-experts // gpus) + spare), workload[chosen]


def _measure(cluster: GpuCluster, workload: Floats, placement: Ints, report: DirectorPaperReport) -> Measures:
    """Return the measures of a placement. Latencies are the paper's, slowest ranks' times are LayerCost's."""
    latency_s = two_maxima_s(
        workload, placement, topology=cluster.topology, cost=cluster.cost, token_bytes=TOKEN_BYTES
    )
    work = cluster.work(workload, placement)
    sent = float((work.near_bytes + work.far_bytes).sum()) / TOKEN_BYTES
    return {
        "latency_us": 1e6 * latency_s,
        "slowest_ranks_us": 1e6 * float(cluster.step_s(workload, placement).sum()),
        "remote_pct": 100 * sent / float(work.tokens.sum()),
        "load_max_over_mean": max_over_mean(work.tokens),
        "latency_above_lp_pct": change_pct(latency_s, report.infeasible_s),
        "above_budget_pct": change_pct(latency_s, report.budget_s),
        "theorem_above_lp_pct": change_pct(report.theorem_s, report.infeasible_s),
        "below_theorem_pct": -change_pct(latency_s, report.theorem_s),
    }


def _rows_of_case(label: dict[str, Any], instances: list[dict[str, Measures]]) -> Rows:
    """Return a row for each form, with the interval of each measure over the instances."""
    rows: Rows = []
    for form in instances[0]:
        of_form = [measures[form] for measures in instances]
        above = sum(1 for measures in of_form if measures["below_theorem_pct"] < -_TOLERANCE_PCT)
        row = label | {"form": form, "instances": len(of_form), "above_theorem": above}
        rows.append(row | summarise_runs(of_form))
    return rows


def _show_solve(budget_s: float, feasible: bool) -> None:
    print(f"LP with a budget of {1e6 * budget_s:.1f} us: {'' if feasible else 'in'}feasible", flush=True)


FIGURES = {
    "forms": PaperFigure(
        "Algorithm 1 as written beside our placement: the paper's latency, Theorem 2's bound, time to solve",
        "at most (1 + epsilon) times the LP's optimum, with high probability (Theorem 2)",
        forms,
        bar_plot("{form}, {spare_slots} spare", "latency_above_lp_pct", ("workload", "gpus")),
    ),
}
