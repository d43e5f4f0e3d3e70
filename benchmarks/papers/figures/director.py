"""DIRECTOR's evaluation, simulated with real routes (paper, section VIII)."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

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
    line_plot,
)
from benchmarks.papers.figures.metro import HalvedTrace
from benchmarks.papers.figures.shifting import (
    CLUSTERS,
    TOKEN_BYTES,
    Batch,
    Forecast,
    GpuCluster,
    ServedBatches,
)
from eldr_serve.experts.calibration_trace import CalibrationTrace
from offline.expert_placement.director import director_placement

BATCHES = 8
BATCH_OF_FIGURE_2 = 32  # requests
LAYER_OF_FIGURE_2 = (20, 28)  # layer 20 of the 28 of DeepSeekMoE 16B; other models' in proportion
RANKS = 32
FEW_RANKS = 8
STOPPED = "proactive, corrected signature, moved between steps"  # the others move in compute windows


def frequencies(options: Options) -> Rows:
    """Measure how an expert's share of a layer's tokens differs between batches of 32 requests (Fig. 2)."""
    rows: Rows = []
    for path in options.all_traces("calibration traces with routes, or published routes"):
        half = HalvedTrace.read(path, options.seeds[0])
        tokens = half.batches(BATCH_OF_FIGURE_2, options.requests or 100, options.seeds[0])
        layer = tokens.shape[1] * LAYER_OF_FIGURE_2[0] // LAYER_OF_FIGURE_2[1]
        share = 100 * tokens[:, layer] / tokens[:, layer].sum(axis=1, keepdims=True)  # [n, E]
        for expert in np.argsort(-share.mean(axis=0), kind="stable"):
            of_expert = share[:, expert]
            row = {"trace": half.name, "layer": layer, "expert": int(expert)}
            row |= {"share_pct": float(of_expert.mean()), "share_deviation_pct": float(of_expert.std())}
            extremes = {"lowest": float(of_expert.min()), "highest": float(of_expert.max())}
            rows.append(row | {f"share_pct_{name}": share_pct for name, share_pct in extremes.items()})
    return rows


def latency(options: Options) -> Rows:
    """Compare every placement rule on both clusters with 32 GPUs each (Figs. 7 and 8)."""
    traces = read_traces(options)

    def run(case: tuple[Path, str], seed: int) -> dict[str, ServedBatches]:
        return _serve_by_rule(options, traces[case[0]], case[1], RANKS, seed)

    rows: Rows = []
    for (path, name), runs in each_seed(options, product(traces, CLUSTERS), run):
        rows += _rows_of_case({"trace": traces[path].model, "cluster": name}, runs)
    return rows


def gpus(options: Options) -> Rows:
    """Compare the placement rules on 4 to 32 H200 GPUs (Fig. 9)."""
    traces = read_traces(options)

    def run(case: tuple[Path, int], seed: int) -> dict[str, ServedBatches]:
        return _serve_by_rule(options, traces[case[0]], "H200", case[1], seed)

    rows: Rows = []
    for (path, ranks), runs in each_seed(options, product(traces, (4, 8, 16, 32)), run):
        for row in _rows_of_case({"trace": traces[path].model, "gpus": ranks}, runs):
            paper = {4: -11, 32: -48}.get(ranks) if row["placement"] == "proactive, oracle" else None
            rows.append(row | {"paper_pct": paper})
    return rows


def optimisers(options: Options) -> Rows:
    """Compare rounding with the LP's bound, given each batch's true workload, on 8 and 32 GPUs (Fig. 11)."""
    rows: Rows = []
    sizes = (FEW_RANKS, RANKS)
    for trace in read_traces(options).values():
        for name, ranks in product(CLUSTERS, sizes):
            cluster, batches, history = _case(options, trace, name, ranks, options.seeds[0])
            offline = cluster.place(history)
            work = [batch.workload for batch in batches]
            static = np.array([cluster.step_s(w, offline).sum() for w in work])
            label = {"workload": f"{trace.model} on {ranks} {name}", "gpus": ranks}
            label |= {"layers": trace.prefill_counts.shape[1]}
            rows += _optimiser_rows(label, cluster, work, static)
    for ranks in sizes:
        rows += _optimiser_rows(*synthetic_case(options.seeds[0], ranks))
    return rows


class SolvedPlacement(NamedTuple):
    """A placement with its time, the LP's optimum, and the bound with whole replicas, in seconds."""

    placement: NDArray[np.int64]
    reached_s: float
    lp_s: float
    bound_s: float


def _place_by_lp(cluster: GpuCluster, workload: NDArray[np.float64]) -> SolvedPlacement:
    """Round the LP's solution."""
    placement, report = director_placement(workload, **solver_arguments(cluster))
    return SolvedPlacement(placement, report.rank_s.sum(), report.lp_s.sum(), report.bound_s.sum())


def _place_by_experts(cluster: GpuCluster, workload: NDArray[np.float64]) -> SolvedPlacement:
    """Place like _place_by_lp, but without knowing which rank each token is on."""
    return _place_by_lp(cluster, workload.sum(axis=1))


def solver_arguments(cluster: GpuCluster) -> dict[str, Any]:
    """Return the arguments of `director_placement` that describe the GPUs."""
    keys = {"topology": cluster.topology, "slots": cluster.slots, "cost": cluster.cost}
    return keys | {"token_bytes": TOKEN_BYTES}


def _optimiser_rows(
    label: dict[str, Any], cluster: GpuCluster, work: list[NDArray[np.float64]], static: NDArray[np.float64]
) -> Rows:
    methods = {"LP rounding": _place_by_lp, "LP rounding, tokens by expert alone": _place_by_experts}
    rows: Rows = []
    for method, place in methods.items():
        total, reached_s, lp_s, bound_s, seconds = np.zeros((5, len(work)))
        for number, workload in enumerate(work):
            started_at_s = perf_counter()
            placement, reached_s[number], lp_s[number], bound_s[number] = place(cluster, workload)
            seconds[number] = perf_counter() - started_at_s
            total[number] = cluster.step_s(workload, placement).sum()
        figures = {
            "method": method,
            "change_pct": float(np.mean(100 * (total / static - 1))),
            "paper_pct": "-39..-58" if cluster.topology.ranks == RANKS else None,
            "above_lp_pct": float(np.mean(100 * (reached_s / lp_s - 1))),
            "above_bound_pct": float(np.mean(100 * (reached_s / bound_s - 1))),
            "solve_p50_s": float(np.median(seconds)),
            "solve_max_s": float(np.max(seconds)),
        }
        rows.append(label | figures)
    return rows


def synthetic_case(
    seed: int, ranks: int
) -> tuple[dict[str, Any], GpuCluster, list[NDArray[np.float64]], NDArray[np.float64]]:
    """Return 48 layers x 128 experts on the GPUs, with log-normal loads that change from batch to batch."""
    rng = np.random.default_rng(seed)
    layers, experts = 48, 128
    cluster = GpuCluster.from_name("H200", ranks, experts)
    steady = rng.normal(0, 0.7, (layers, experts))
    work = []
    for _ in range(5):
        popular = np.exp(steady + rng.normal(0, 0.7, (layers, experts)))
        share = popular / popular.sum(axis=1, keepdims=True) * 8 * shifting.PER_RANK
        work.append(rng.poisson(np.repeat(share[:, None], ranks, axis=1)).astype(np.float64))
    offline = cluster.place(np.repeat(np.exp(steady)[:, None], ranks, axis=1))
    static = np.array([cluster.step_s(w, offline).sum() for w in work])
    label = {"workload": f"synthetic, on {ranks} H200", "gpus": ranks, "layers": layers}
    return label, cluster, work, static


def read_traces(options: Options) -> dict[Path, CalibrationTrace]:
    """Return the options' traces, which need routes of equally long answers."""
    paths = options.all_traces("routes: a calibration trace with routes, or published routes")
    return {path: shifting.read_routes(path) for path in paths}


def _case(
    options: Options, trace: CalibrationTrace, name: str, ranks: int, seed: int
) -> tuple[GpuCluster, list[Batch], NDArray[np.float64]]:
    """Return (cluster, batches of the measured half, mean workload of batches of the fitted half)."""
    experts = trace.prefill_counts.shape[2]
    cluster = GpuCluster.from_name(name, ranks, experts)
    fit, measure = shifting.split(trace, seed)
    number = BATCHES if options.requests is None else max(2, options.requests // (shifting.PER_RANK * ranks))
    batches = shifting.shifting_batches(trace, measure, number, ranks, seed)
    past = shifting.shifting_batches(trace, fit, number, ranks, seed + 1)
    return cluster, batches, np.mean([batch.workload for batch in past], axis=0)


def _serve_by_rule(
    options: Options, trace: CalibrationTrace, name: str, ranks: int, seed: int
) -> dict[str, ServedBatches]:
    """Return the batches as each placement rule serves them."""
    _, layers, experts = trace.prefill_counts.shape
    cluster, batches, history = _case(options, trace, name, ranks, seed)
    offline = cluster.place(history)
    corrected = shifting.counted_forecast(
        trace.prefill_counts * shifting.correction(trace, shifting.split(trace, seed)[0]),
        trace.prompt_tokens,
    )
    forecasts: dict[str, Forecast] = {
        "reactive": shifting.reactive_forecast(batches, history),
        "proactive, signature": shifting.counted_forecast(trace.prefill_counts, trace.prompt_tokens),
        "proactive, corrected signature": corrected,
        "proactive, oracle": lambda batch: batch.workload,
    }
    return {
        "vanilla": shifting.serve_with_one_placement(cluster, batches, cluster.vanilla(layers, experts)),
        "offline": shifting.serve_with_one_placement(cluster, batches, offline),
        **{rule: shifting.serve_adaptively(cluster, batches, offline, f) for rule, f in forecasts.items()},
        STOPPED: shifting.serve_adaptively(cluster, batches, offline, corrected, overlapped=False),
    }


def _rows_of_case(label: dict[str, Any], runs: list[dict[str, ServedBatches]]) -> Rows:
    """Return a row per rule, compared with the offline placement of the same seed."""
    rows: Rows = []
    offline = np.concatenate([run["offline"].batch_ms for run in runs])
    for rule in runs[0]:
        batch_ms = np.concatenate([run[rule].batch_ms for run in runs])
        rows.append(
            label
            | {
                "placement": rule,
                "batch_ms": float(batch_ms.mean()),
                "batch_deviation_ms": float(batch_ms.std()),
                "change_pct": change_pct(float(batch_ms.mean()), float(offline.mean())),
                "worst_change_pct": change_pct(float(batch_ms.max()), float(offline.max())),
                "moves_a_batch": float(np.mean([run[rule].moves.mean() for run in runs])),
            }
        )
    return rows


FIGURES = {
    "fig2": PaperFigure(
        "Share of each expert in a layer's tokens, by batch of 32 requests",
        "the selection frequency of any expert varies significantly (DeepSeekMoE 16B, layer 20)",
        frequencies,
        line_plot("expert", "share_pct_lowest", "share_pct", "share_pct_highest", panels=("trace",)),
    ),
    "fig7": PaperFigure(
        "Batch latency of static, reactive and proactive placement, 32 GPUs of two kinds",
        "DIRECTOR is 11 to 55 % below the offline placement; reactive is mostly worse than offline, with the "
        "sharpest spikes (Fig. 8), DIRECTOR has the least variance",
        latency,
        bar_plot("placement", "change_pct", ("trace", "cluster")),
    ),
    "fig9": PaperFigure(
        "The same by the number of GPUs, H200",
        "DIRECTOR against offline: -11 % at 4 GPUs to -48 % at 32",
        gpus,
        line_plot("gpus", "change_pct", by="placement", panels=("trace",)),
    ),
    "fig11": PaperFigure(
        "Placement by rounding against the LP's bound, 8 and 32 GPUs",
        "against a baseline without prediction: DIRECTOR -39 to -58 %, annealing -24 to -32 %",
        optimisers,
    ),
}
