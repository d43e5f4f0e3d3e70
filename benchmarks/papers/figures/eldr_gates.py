"""Signatures of the demo model's gates beside those of expert counts (ELDR, Figures 7 and 14)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.papers.figures.common import (
    Options,
    PaperFigure,
    Rows,
    change_pct,
    each_seed,
    requests_at_batch,
    summarise_runs,
)
from benchmarks.papers.figures.eldr import workloads
from benchmarks.papers.figures.eldr_domains import PER_WORKER, Index, cost_of
from benchmarks.papers.token_routes import gate_sums, is_of_the_demo_model
from eldr_serve.errors import UserInputError
from eldr_serve.experts.calibration_trace import CalibrationTrace
from eldr_serve.experts.fitting.quality import inverse_document_frequency, select_layers, signature_quality
from eldr_serve.experts.fitting.table import fit_table
from eldr_serve.scheduling import make_policy
from loadgen.progress import progress_bar
from offline.scenario import read_calibration_trace
from offline.simulation.cluster import Cluster, Decode
from offline.simulation.requests import Experts
from offline.simulation.run import simulate

WORKERS = 16
IDF = "count-idf"  # the paper's transform
Sums = NDArray[np.float32]


def gates(options: Options) -> Rows:
    """Measure rho of counts, counts with IDF, gate probabilities and gate logits, and TPOT but for the last.

    Signatures are means over a prompt's tokens, with all layers and with the layers that the greedy search
    keeps on the fit's requests. As in the paper, only counts have IDF.
    """
    trace = read_calibration_trace(options.trace("a calibration trace of the demo model with token ids"))
    if not is_of_the_demo_model(trace):
        raise UserInputError(f"the gates of {trace.model} are not here: give --trace one of the demo model")
    probabilities, logits = _all_sums(trace)
    counts = trace.prefill_counts
    sums: dict[str, NDArray[Any]] = {"count": counts, IDF: counts}
    sums |= {"gate-prob": probabilities, "gate-logit": logits}

    def run(case: tuple[str, tuple[str, ...]], seed: int) -> dict[str, dict[str, float]]:
        members = np.flatnonzero([name in case[1] for name in trace.domains])
        order = np.random.default_rng(seed).permutation(members)
        fit, test = order[::2], order[1::2]
        results = {}
        for name, values in sums.items():
            weights = inverse_document_frequency(values[fit]) if name == IDF else None
            results[name] = _rhos(trace, values, weights, fit, test, seed)
        changes = _tpot_changes(options, trace, probabilities, fit, test, seed)
        return {name: rhos | changes.get(name, {}) for name, rhos in results.items()}

    rows: Rows = []
    for (workload, _), runs in each_seed(options, workloads(trace).items(), run):
        for transform in sums:
            row: dict[str, Any] = {"workload": workload, "transform": transform}
            rows.append(row | summarise_runs([result[transform] for result in runs]))
    return rows


def _all_sums(trace: CalibrationTrace) -> tuple[Sums, Sums]:
    """Return the sums of all prompts' gate probabilities and logits, float32[N, L, E] each."""
    with progress_bar() as progress:
        pairs = list(progress.track(gate_sums(trace.prompts), total=len(trace.ids), description="gates"))
    probabilities, logits = (np.stack(arrays) for arrays in zip(*pairs, strict=True))
    return probabilities, logits


def _rhos(
    trace: CalibrationTrace, sums: NDArray[Any], weights: Sums | None, fit: Index, test: Index, seed: int
) -> dict[str, float]:
    """Return rho of the held-out requests with all layers and with the kept ones."""
    means = sums / np.maximum(trace.prompt_tokens, 1)[:, None, None]
    if weights is not None:
        means = means * weights
    decode = trace.decode_probability
    layers = select_layers(means[fit], decode[fit], seed=seed).best_layers
    return {
        "rho_all_layers": signature_quality(means[test], decode[test], seed=seed),
        "rho_kept_layers": signature_quality(means[test][:, layers], decode[test], seed=seed),
        "layers_kept": float(len(layers)),
    }


def _tpot_changes(
    options: Options, trace: CalibrationTrace, probabilities: Sums, fit: Index, test: Index, seed: int
) -> dict[str, dict[str, float]]:
    """Return the changes of TPOT under `locality-band` against shortest-queue, by kind of signature."""
    cost, rng = cost_of(options, trace), np.random.default_rng([seed, WORKERS])
    kinds = rng.choice(test, options.requests or PER_WORKER * WORKERS)
    counted = Experts.from_trace(trace)
    requests = requests_at_batch(trace, counted, kinds, WORKERS, cost, rng)
    cluster = Cluster(decode=Decode(workers=WORKERS, cost=cost))

    def tpot(observed: CalibrationTrace, experts: Experts, transform: str | None) -> dict[str, Any]:
        policy = make_policy("locality-band" if transform else "shortest-queue")
        if transform:
            table, _ = fit_table(observed.subset_without_routes(fit), WORKERS, transform=transform, seed=seed)
            policy = policy.set_table(table)
        policy.update_cost_model(cost)
        return simulate(requests, policy, cluster, experts=experts, seed=seed).summary()

    as_counts = replace(trace, prefill_counts=_as_counts(probabilities, trace))
    base = tpot(trace, counted, None)
    return {
        name: {
            f"{q}_change_pct": change_pct(summary[f"tpot_{q}_ms"], base[f"tpot_{q}_ms"])
            for q in ("p50", "p99")
        }
        for name, summary in (
            ("count", tpot(trace, counted, "count")),
            (IDF, tpot(trace, counted, IDF)),
            ("gate-prob", tpot(as_counts, Experts.from_trace(as_counts), "count")),
        )
    }


def _as_counts(probabilities: Sums, trace: CalibrationTrace) -> NDArray[np.uint32]:
    """Round probabilities, in proportion, to counts that add up to top_k experts per token in each layer."""
    total = trace.prompt_tokens.astype(np.int64)[:, None] * trace.top_k  # [N, 1]
    exact = probabilities / probabilities.sum(axis=2, keepdims=True) * total[..., None]
    counts = np.floor(exact).astype(np.int64)
    missing = total - counts.sum(axis=2)  # [N, L]
    rank = np.argsort(np.argsort(counts - exact, axis=2), axis=2)  # 0 for the largest remainder
    rounded: NDArray[np.uint32] = (counts + (rank < missing[..., None])).astype(np.uint32)
    return rounded


FIGURES = {
    "gates": PaperFigure(
        "Signatures of counts, gate probabilities and gate logits: rho and TPOT (Figures 7 and 14)",
        "count-idf is better than the gates' softmax by 3 % of the median TPOT on average",
        gates,
    ),
}
