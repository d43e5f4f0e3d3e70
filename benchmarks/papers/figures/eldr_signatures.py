"""ELDR's questions about signatures and clusters, on routes of real models and of the demo model.

`signatures`, `prompt-length` and `starts` only fit. `variants` also simulates `locality-band` with tables
that differ in one respect. Tables are fitted to one half of each domain's requests and used for the other.
"""

from __future__ import annotations

import time
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import pearsonr

from benchmarks.papers.figures.common import (
    Options,
    PaperFigure,
    Rows,
    change_pct,
    each_seed,
    requests_at_batch,
    summarise_runs,
    summarise_seeds,
    with_progress,
)
from benchmarks.papers.figures.eldr_domains import PER_WORKER, TRACES, cost_of, draw_requests, halves
from eldr_serve.experts.calibration_trace import CalibrationTrace
from eldr_serve.experts.fitting.clustering import STARTS, balanced_kmeans, kmeans
from eldr_serve.experts.fitting.quality import signature_quality
from eldr_serve.experts.fitting.table import fit_signature, signature_weights
from eldr_serve.experts.routing_table import RoutingTable
from eldr_serve.experts.signature import TRANSFORMS, SignatureSpec
from eldr_serve.scheduling import make_policy
from offline.route_files import read_samples, select_long_enough
from offline.scenario import read_calibration_trace
from offline.simulation.cluster import Cluster, Decode
from offline.simulation.requests import Experts
from offline.simulation.run import simulate

LENGTHS = (16, 32, 64, 128, 256)  # tokens
CLUSTERS = (4, 8, 16)
WORKERS = (8, 16)
TRIED = 64  # starts of balanced K-means that are measured
IDF = ("count", "count-idf", "count-1+idf")
BANDS = (0.0, 0.05, 0.1, 0.2)
PAPER: dict[str, Any] = {  # the paper's table and band, but for the starts
    "transform": "count-idf",
    "band": 0.1,
    "masked": True,
    "balanced": True,
    "starts": STARTS,
}
VARIANTS: dict[str, dict[str, Any]] = (
    {f"{name}, band {band:g}": {"transform": name, "band": band} for name in IDF for band in BANDS}
    | {name: {"transform": name} for name in TRANSFORMS if name not in IDF}
    | {"all layers": {"masked": False}, "clusters of any size": {"balanced": False}}
    | {f"{starts} starts": {"starts": starts} for starts in (1, 32)}
)


def signatures(options: Options) -> Rows:
    """Measure rho by transform, with all layers and with the mask, on the fit's requests and on others."""

    def run(case: tuple[Path, str], seed: int) -> dict[str, float]:
        path, transform = case
        trace = read_calibration_trace(path)
        fit, test = (trace.subset_without_routes(part) for part in halves(trace, seed))
        masked = fit_signature(fit, transform, seed=seed)
        rhos: dict[str, float] = {}
        for layers, spec in (("all_layers", _all_layers(masked)), ("kept_layers", masked)):
            for part, requests in (("fit", fit), ("held_out", test)):
                rhos[f"rho_{part}_{layers}"] = signature_quality(
                    spec.encode(requests.prefill_counts), requests.decode_probability, seed=seed
                )
        return rhos | {"layers_kept": float(len(masked.layers))}

    rows: Rows = []
    for (path, transform), runs in each_seed(options, product(options.all_traces(TRACES), TRANSFORMS), run):
        trace = read_calibration_trace(path)
        row: dict[str, Any] = {"model": trace.model, "transform": transform, "requests": len(trace.ids)}
        rows.append(row | summarise_runs(runs) | {"layers": trace.prefill_counts.shape[1]})
    return rows


def prompt_length(options: Options) -> Rows:
    """Measure rho with and without IDF, with all layers, counting only the first tokens of prompts."""
    rows: Rows = []
    for path in with_progress(options.all_traces(TRACES)):
        trace = read_calibration_trace(path)
        for length, counts in _first_tokens(path, trace).items():
            part = replace(trace, prefill_counts=counts, prompt_tokens=_tokens(counts, trace.top_k))
            points = [_mean_share(part, which) for which in ("prefill_counts", "decode_counts")]
            row: dict[str, Any] = {"model": trace.model, "prompt_tokens": length}
            row |= {"requests": len(trace.ids), "tokens_p50": float(np.median(part.prompt_tokens))}
            row["experts_of_nearly_all_pct"] = 100 * float(((counts > 0).mean(axis=0) >= 0.9).mean())
            row["pearson"] = float(pearsonr(*points)[0])
            for transform in IDF:
                rhos = []
                for seed in options.seeds:
                    fit, test = (part.subset_without_routes(index) for index in halves(part, seed))
                    element, weights = signature_weights(fit, transform)
                    spec = SignatureSpec(weights, np.arange(len(weights)), element)
                    signature = spec.encode(test.prefill_counts)
                    rhos.append(signature_quality(signature, test.decode_probability, seed=seed))
                row |= summarise_seeds(f"rho_{transform}", rhos)
            rows.append(row)
    return rows


def starts(options: Options) -> Rows:
    """Measure how far the best of n starts of balanced K-means is above the best of all, and its CPU time."""
    rows: Rows = []
    for path, k in with_progress(product(options.all_traces(TRACES), CLUSTERS)):
        trace = read_calibration_trace(path)
        points = fit_signature(trace).encode(trace.prefill_counts)
        began = time.process_time()
        distances = [
            balanced_kmeans(points, k, seed=seed, starts=1).distance(points) for seed in range(TRIED)
        ]
        seconds = (time.process_time() - began) / TRIED
        excess = np.array([change_pct(distance, min(distances)) for distance in distances])
        rng = np.random.default_rng(0)
        for n in (1, 2, 4, 8, 16, 32):
            best = [rng.choice(excess, n, replace=False).min() for _ in range(1000)]
            row = {"model": trace.model, "requests": len(trace.ids), "clusters": k, "starts": n}
            row |= {
                "above_best_mean_pct": float(np.mean(best)),
                "above_best_p95_pct": float(np.quantile(best, 0.95)),
            }
            rows.append(row | {"cpu_ms": 1000 * n * seconds})
    return rows


def variants(options: Options) -> Rows:
    """Compare TPOT of `locality-band` with shortest-queue's, by table and band. The rest is as in PAPER."""

    def run(case: tuple[Path, int], seed: int) -> dict[str, dict[str, Any]]:
        path, workers = case
        trace = read_calibration_trace(path)
        cost, experts = cost_of(options, trace), Experts.from_trace(trace)
        fit, test = halves(trace, seed)
        rng = np.random.default_rng([seed, workers])
        kinds = draw_requests(trace, test, "as recorded", options.requests or PER_WORKER * workers, rng)
        requests = requests_at_batch(trace, experts, kinds, workers, cost, rng)
        cluster = Cluster(decode=Decode(workers=workers, cost=cost))

        def summary(name: str, table: RoutingTable | None = None, **parameters: Any) -> dict[str, Any]:
            policy = make_policy(name, **parameters).set_table(table)
            policy.update_cost_model(cost)
            return simulate(requests, policy, cluster, experts=experts, seed=seed).summary()

        summaries = {name: summary(name) for name in ("shortest-queue", "marginal-cost")}
        tables: dict[str, RoutingTable] = {}
        for label, changes in VARIANTS.items():
            settings = PAPER | changes
            band, key = settings.pop("band"), str(settings)
            if key not in tables:
                tables[key] = _table(trace.subset_without_routes(fit), workers, seed=seed, **settings)
            summaries[label] = summary("locality-band", tables[key], band=band)
        return summaries

    rows: Rows = []
    for (path, workers), runs in each_seed(options, product(options.all_traces(TRACES), WORKERS), run):
        for label in runs[0]:
            row: dict[str, Any] = {"model": read_calibration_trace(path).model, "workers": workers}
            row["arm"] = label
            for q in ("p50", "p99"):
                key = f"tpot_{q}_ms"
                changes = [
                    change_pct(summaries[label][key], summaries["shortest-queue"][key]) for summaries in runs
                ]
                row |= {key: float(np.mean([summaries[label][key] for summaries in runs]))}
                row |= summarise_seeds(f"{q}_change_pct", changes)
            rows.append(row | {"active_experts": float(np.mean([f[label]["active_experts"] for f in runs]))})
    return rows


def _table(
    trace: CalibrationTrace,
    workers: int,
    *,
    transform: str,
    masked: bool,
    balanced: bool,
    starts: int,
    seed: int,
) -> RoutingTable:
    spec = fit_signature(trace, transform, seed=seed)
    spec = spec if masked else _all_layers(spec)
    points = spec.encode(trace.prefill_counts)
    clusters = (
        balanced_kmeans(points, workers, seed=seed, starts=starts)
        if balanced
        else kmeans(points, workers, seed=seed)
    )
    names = [""] * workers
    return RoutingTable(trace.model, spec, clusters.centroids, clusters.sizes, names, transform=transform)


def _all_layers(spec: SignatureSpec) -> SignatureSpec:
    return replace(spec, layers=np.arange(len(spec.weights)))


def _first_tokens(path: Path, trace: CalibrationTrace) -> dict[int | str, Any]:
    """Return the counts, uint32[N,L,E], of the first tokens of each prompt, by their number.

    Calibration traces have no routes of single prompt tokens: theirs are those of whole prompts.
    """
    whole: dict[int | str, Any] = {"all": trace.prefill_counts}
    if path.suffix == ".safetensors":
        return whole
    model, samples = read_samples(path)
    prompts = [
        s.routes[:n] for s, n in zip(select_long_enough(samples, model.cut), trace.prompt_tokens, strict=True)
    ]
    shorter = [n for n in LENGTHS if n < trace.prompt_tokens.max()]
    return {n: np.stack([model.counts(p[:n]) for p in prompts]) for n in shorter} | whole


def _tokens(counts: Any, top_k: int) -> Any:
    return (counts[:, 0].sum(axis=1) // top_k).astype(np.uint32)


def _mean_share(trace: CalibrationTrace, which: str) -> Any:
    """Return float[L*E], the share of each expert in a layer's choices: mean over requests, then domains."""
    counts, names = getattr(trace, which), np.array(trace.domains)
    share = counts / np.maximum(counts.sum(axis=2, keepdims=True), 1)
    return np.mean([share[names == name].mean(axis=0) for name in set(trace.domains)], axis=0).ravel()


FIGURES = {
    "signatures": PaperFigure(
        "How well prefill predicts decode: rho by transform, all layers and the mask (Figures 7, 8)",
        "all layers, mean over models and workloads: count-idf 1.5 points above count, up to 8.9 (GPT-OSS, "
        "task); the mask adds 0.005 to 0.032",
        signatures,
    ),
    "prompt-length": PaperFigure(
        "rho with and without IDF by the counted tokens of a prompt", "not in the papers", prompt_length
    ),
    "starts": PaperFigure(
        "Mean distance to the own centroid by starts of balanced K-means", "not in the papers", starts
    ),
    "variants": PaperFigure(
        "locality-band by transform, band, layers and clustering against shortest-queue (Figures 14 to 16)",
        "against round-robin: a band of 0.1 has a median of -5.2 to -12.7 %, one of 0 a p99 of up to +7.9 %; "
        "clusters of any size have a median of up to -9.8 % and a p99 of up to +17.4 %",
        variants,
    ),
}
