"""ELDR with decode workers under expert parallelism (paper, Figure 18), simulated with real routes.

Each decode worker has four ranks, and in every layer a step waits for the rank with most active experts.
Placements are tested on held-out requests. Step costs are those of `benchmarks.papers.figures.eldr`, with the
active experts of the slowest rank. The paper uses other GPUs, another model and other batches, so its
percentages differ.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.papers.figures.common import Options, PaperFigure, Rows, change_pct, each_seed, mean
from benchmarks.papers.figures.eldr import BALANCERS, PREFILL, scenario_of, workloads
from eldr_serve.errors import UserInputError
from eldr_serve.experts.calibration_trace import CalibrationTrace
from loadgen.plots import lines
from offline.expert_placement.packed_placements import activation_placement
from offline.scenario import PolicyChoice, Scenario, ScenarioInputs, read_calibration_trace
from offline.simulation.run import simulate

WORKERS, PREFILL_WORKERS, RANKS = 8, 2, 4
RATES = (24, 40, 56)  # requests/s, over the paper's range
OUTPUT_TOKENS = 512  # the paper has the same
SECONDS = 20.0  # duration of arrivals in a run
BATCH = 16  # batch size for which placements are fitted; sizes from 8 to 25 give equal results
ARMS = (
    *((balancer, "linear") for balancer in BALANCERS),
    ("shortest-queue", "one for all"),
    *((p, placed) for p in ("locality-band", "marginal-cost") for placed in ("linear", "one for all", "own")),
)
PAPER = {"paper_p50_pct": "-2.7 to -4.3", "paper_p99_pct": "-0.6 to -2.0"}  # language, own placements


def expert_parallel(options: Options) -> Rows:
    """Compare TPOT and active experts of the slowest rank at 2P8D, TP=4 and EP=4, by rate."""
    path = options.trace("a calibration trace with routes, or published routes")
    groups = workloads(read_calibration_trace(path))

    def run(case: tuple[str, int], seed: int) -> dict[tuple[str, str], dict[str, Any]]:
        group, rate = case
        scenario = _scenario(options, groups[group], rate, seed)
        inputs = ScenarioInputs(scenario, seed)
        ranks_by_placement = _placements(read_calibration_trace(path), inputs)
        return {
            (policy, placement): simulate(
                inputs.requests,
                inputs.policy(PolicyChoice(name=policy), scenario.cluster),
                scenario.cluster,
                experts=inputs.experts,
                ranks=ranks_by_placement[placement],
                seed=seed,
            ).summary()
            for policy, placement in ARMS
        }

    rows: Rows = []
    for (group, rate), runs in each_seed(options, product(groups, RATES), run):
        rows += _rows_of_case(group, rate, {arm: mean([run[arm] for run in runs]) for arm in ARMS})
    return rows


def _scenario(options: Options, domains: tuple[str, ...], rate: float, seed: int) -> Scenario:
    # A prefill worker also has four GPUs.
    per_token_s = PREFILL.per_token_s / RANKS
    prefill = PREFILL.model_copy(update={"workers": PREFILL_WORKERS, "per_token_s": per_token_s})
    return scenario_of(
        options,
        domains,
        prefill=prefill,
        decode_workers=WORKERS,
        rate_per_s=rate,
        requests=round(rate * SECONDS),
        output_tokens=OUTPUT_TOKENS,
        seed=seed,
    )


def _placements(trace: CalibrationTrace, inputs: ScenarioInputs) -> dict[str, NDArray[np.int64]]:
    """Return each expert's rank, [L, E] or [K, L, E]: by id, by all activations, by each worker's band."""
    layers, experts = trace.prefill_counts.shape[1:]
    if experts % RANKS:
        raise UserInputError(f"{experts} experts cannot be split evenly over {RANKS} ranks")
    if inputs.table is None:
        raise UserInputError(f"too few requests to make {WORKERS} clusters")
    linear = np.broadcast_to(np.arange(experts) // (experts // RANKS), (layers, experts))
    probability = trace.decode_probability[inputs.fitted_on]
    similarity = np.stack([inputs.table.similarity(trace.prefill_counts[i]) for i in inputs.fitted_on])
    in_band = similarity >= similarity.max(axis=1, keepdims=True) - inputs.table.band  # [n, K]
    return {
        "linear": linear,
        "one for all": _ranks(probability),
        "own": np.stack(
            [_ranks(probability[members] if members.any() else probability) for members in in_band.T]
        ),
    }


def _ranks(probability: NDArray[np.floating]) -> NDArray[np.int64]:
    """Return int[L, E], the rank of each expert, for batches of requests with probability[n, L, E].

    The criterion is whether a step activates an expert. A single request's mean would overweight the few
    experts that all requests use, although a whole batch activates many others almost as surely.
    """
    experts = activation_placement(1 - (1 - probability.mean(axis=0)) ** BATCH, RANKS)
    ranks = np.empty_like(experts)
    np.put_along_axis(
        ranks, experts, np.arange(experts.shape[1])[None] // (experts.shape[1] // RANKS), axis=1
    )
    return ranks


def _rows_of_case(group: str, rate: float, means: dict[tuple[str, str], dict[str, Any]]) -> Rows:
    """Return a row of means per arm, with changes against the best balancer at linear placement."""
    keys = ("tpot_p50_ms", "tpot_p99_ms", "active_experts")
    best = {key: min(means[balancer, "linear"][key] for balancer in BALANCERS) for key in keys}
    rows = []
    for (policy, placement), figures in means.items():
        is_papers_case = group != "task" and (policy, placement) == ("locality-band", "own")
        row = {"workload": group, "rate_per_s": rate, "policy": policy, "placement": placement}
        row |= {key: figures[key] for key in (*keys, "batch_size")}
        row |= {f"{k.removesuffix('_ms')}_change_pct": change_pct(figures[k], best[k]) for k in keys}
        rows.append(row | {key: value if is_papers_case else None for key, value in PAPER.items()})
    return rows


FIGURES = {
    "expert-parallel": PaperFigure(
        "TPOT at 2P8D with TP=4 and EP=4 per worker (Figure 18)",
        "locality-band with per-decoder placement against the best load balancer, language, 24 to 56 "
        "requests/s: median -2.7 to -4.3 %, p99 -0.6 to -2.0 % (Qwen3-235B-A22B)",
        expert_parallel,
        lambda rows, path: lines(
            [
                row | {"arm": f"{row['policy']}, {row['placement']}"}
                for row in rows
                if row["policy"] not in BALANCERS or row["policy"] == "shortest-queue"
            ],
            "rate_per_s",
            ["tpot_p50_ms"],
            path,
            by="arm",
        ),
    )
}
