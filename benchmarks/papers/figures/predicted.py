"""Signatures that are predicted from prompts' tokens: their accuracy, and the gain of placement by them.

A run fits predictors on some prompts of a capture (a calibration trace with routes and token ids) and
measures on others. Costs and workers are those of `eldr`'s figures, without prefill workers: requests are
placed as they arrive, whatever their signature is, so that only its content differs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np

from benchmarks.papers.figures.common import (
    Options,
    Rows,
    bar_plot,
    change_pct,
    each_seed,
    own_figure,
    requests_at_batch,
    summarise_runs,
    summarise_seeds,
)
from benchmarks.papers.figures.eldr import BALANCERS, COST
from benchmarks.papers.figures.predicted_signatures import (
    SIZES,
    USUAL,
    Counts,
    Index,
    decode_frequencies,
    fit_and_test,
    fitted_predictor,
    frequencies_of,
    gptoss_prompts,
    members_by_domain,
    members_of_group,
    online_counts,
    predicted_counts,
    prompts_of,
    recent_mean_counts,
    scale_to_counts,
)
from benchmarks.papers.signature_methods import Prompts, chi_square_ridge, methods_for
from eldr_serve.arrays import Floats
from eldr_serve.experts.calibration_trace import CalibrationTrace
from eldr_serve.experts.fitting.clustering import balanced_kmeans
from eldr_serve.experts.fitting.quality import inverse_document_frequency
from eldr_serve.experts.signature import SignatureSpec
from eldr_serve.scheduling import StepCost, make_policy
from loadgen.statistics import paired_change_percent
from offline.predictor import agreement
from offline.simulation.cluster import Cluster, Decode
from offline.simulation.requests import Experts
from offline.simulation.run import simulate

GROUPS = ("all", "language", "task")
WORKERS = (8, 16)
PER_WORKER = 150  # requests
MEASURED = 500  # prompts that methods are compared on
LEARNT = 600  # prompts of a stream before its domains change, and as many after


def methods(options: Options) -> Rows:
    """Compare all methods fitted to 300 prompts, and the served one also to fewer and more."""
    prompts = prompts_of(options)
    known_methods = methods_for(prompts.trace)
    experts = Experts.from_trace(prompts.trace)
    served_method = "served predictor, rank 64"
    cases = [(group, name, USUAL) for group in GROUPS for name in known_methods]
    cases += [(group, served_method, size) for group in GROUPS for size in SIZES if size != USUAL]

    def run(case: tuple[str, str, int], seed: int) -> dict[str, float]:
        group, name, size = case
        fit, test = fit_and_test(prompts.trace, group, size, seed)
        test = test[:MEASURED]
        predicted = known_methods[name](prompts[fit], prompts[test])
        return _accuracy(prompts, fit, test, predicted) | {
            "cluster_experts_pct": _cluster_experts_pct(prompts.trace, experts, fit, test, predicted, seed)
        }

    rows: Rows = []
    for (group, name, size), outcomes in each_seed(options, cases, run):
        row: dict[str, Any] = {"workload": group, "method": name, "prompts": size}
        rows.append(row | summarise_runs(outcomes))
    return rows


def placement(options: Options) -> Rows:
    """Compare `marginal-cost` with true and with predicted signatures against the best balancer."""
    prompts = prompts_of(options)
    trace = prompts.trace

    def run(case: tuple[str, int], seed: int) -> dict[str, dict[str, float]]:
        group, workers = case
        _, test = fit_and_test(trace, group, max(SIZES), seed)
        variants = {"true prefill": trace.prefill_counts.astype(np.float32)}
        variants["true decode"] = scale_to_counts(trace, trace.decode_probability)
        for size in SIZES:
            fit, _ = fit_and_test(trace, group, size, seed)
            variants[f"predicted, {size} prompts"] = predicted_counts(
                trace, fitted_predictor(trace, fit), test
            )
        return _simulate_policies(trace, variants, test, workers, options, seed)

    return _gains(options, [(group, k) for group in GROUPS for k in WORKERS], run)


def held_out(options: Options) -> Rows:
    """Predict each domain by a fit to 300 prompts of the workload's other domains."""
    trace = prompts_of(options).trace

    def run(case: tuple[str, int], seed: int) -> dict[str, dict[str, float]]:
        group, workers = case
        fit, test = fit_and_test(trace, group, USUAL, seed)
        among = members_of_group(trace, group)
        by_others = np.zeros(trace.prefill_counts.shape, np.float32)
        for part in members_by_domain(trace, among):
            rest = np.random.default_rng(seed).permutation(np.setdiff1d(among, part))[:USUAL]
            tested = np.intersect1d(part, test)
            by_others[tested] = predicted_counts(trace, fitted_predictor(trace, rest), tested)[tested]
        variants = {
            "true prefill": trace.prefill_counts.astype(np.float32),
            "predicted, own domain seen": predicted_counts(trace, fitted_predictor(trace, fit), test),
            "predicted, own domain not seen": by_others,
        }
        return _simulate_policies(trace, variants, test, workers, options, seed)

    return _gains(options, list(product(("language", "task"), WORKERS)), run)


def shift(options: Options) -> Rows:
    """Replace half of the domains by others that the fit never saw, with and without online learning."""
    trace = prompts_of(options).trace

    def run(case: str, seed: int) -> dict[str, dict[str, float]]:
        rng = np.random.default_rng(seed)
        among = members_of_group(trace, case)
        parts = members_by_domain(trace, among)
        halves = np.array_split(rng.permutation(len(parts)), 2)
        before, after = (rng.permutation(np.concatenate([parts[n] for n in half])) for half in halves)
        fit, stream = before[:USUAL], np.concatenate([before[USUAL:][:LEARNT], after[:LEARNT]])
        predictor = fitted_predictor(trace, fit)
        variants = {"true prefill": trace.prefill_counts.astype(np.float32)}
        variants["frozen"] = predicted_counts(trace, predictor, stream)
        variants["online"] = online_counts(trace, predictor, stream)
        variants["mean of recent prompts"] = recent_mean_counts(trace, predictor, stream)
        first_new = len(before[USUAL:][:LEARNT])
        outcomes = _simulate_policies(
            trace, variants, stream, 8, options, seed, in_order=True, since=first_new
        )
        for name, counts in variants.items():
            for part, (start, end) in {
                "before": (0, first_new),
                "first_100": (first_new, first_new + 100),
                "later": (first_new + LEARNT // 2, len(stream)),
            }.items():
                members = stream[start:end]
                frequency, truth, mean = (
                    frequencies_of(trace, c, members)
                    for c in (counts, trace.prefill_counts, variants["mean of recent prompts"])
                )
                outcomes[name][f"{part}_cosine"] = agreement(frequency, truth, mean)["cosine"]
        return outcomes

    return _gains(
        options, [(group,) for group in ("language", "task")], lambda case, seed: run(case[0], seed)
    )


def gptoss(options: Options) -> Rows:
    """Predict GPT-OSS-20B's decode from its prompts' text, by another model's tokenizer, in five folds."""
    prompts = gptoss_prompts(options.trace("GPT-OSS-20B records"))
    trace = prompts.trace
    everyone = np.arange(len(trace.ids))
    decode = decode_frequencies(trace)

    def run(case: tuple[str, int], seed: int) -> dict[str, dict[str, float]]:
        predicted, means = np.zeros((2, *prompts.frequencies.shape))
        for part in np.array_split(np.random.default_rng(seed).permutation(everyone), 5):
            rest = np.setdiff1d(everyone, part)
            predicted[part] = chi_square_ridge(prompts[rest], prompts[part])
            means[part] = decode[rest].mean(axis=0)
        variants: dict[str, Floats] = {
            "true prefill": prompts.frequencies,
            "true decode": decode,
            "predicted, four fifths": np.maximum(predicted, 0),
        }
        counts = {name: scale_to_counts(trace, frequency) for name, frequency in variants.items()}
        outcomes = _simulate_policies(trace, counts, everyone, case[1], options, seed)
        for name, frequency in variants.items():
            outcomes[name]["cosine"] = agreement(frequency, decode, means)["cosine"]
        return outcomes

    return _gains(options, [("GPT-OSS-20B", k) for k in WORKERS], run)


def _accuracy(prompts: Prompts, fit: Index, test: Index, predicted: Floats) -> dict[str, float]:
    """Compare deviations from the fitted prompts' means with those of decode and of prefill."""
    decode = decode_frequencies(prompts.trace)
    mean = prompts.frequencies[fit].mean(axis=0)
    fit_quality = agreement(predicted, prompts.frequencies[test], mean)
    shifted = predicted - mean + decode[fit].mean(axis=0)
    return {
        "decode_cosine": agreement(shifted, decode[test], decode[fit].mean(axis=0))["cosine"],
        "prefill_cosine": fit_quality["cosine"],
        "prefill_gain": fit_quality["gain"],
    }


def _cluster_experts_pct(
    trace: CalibrationTrace, experts: Experts, fit: Index, test: Index, predicted: Floats, seed: int
) -> float:
    """Return the change of active experts, %, if batches of 16 are drawn within 8 clusters of signatures."""
    weights = inverse_document_frequency(trace.prefill_counts[fit])
    spec = SignatureSpec(weights, np.arange(len(weights)))
    points = spec.encode(predicted.reshape(-1, *weights.shape))
    labels = balanced_kmeans(points, 8, seed=seed).labels
    rng = np.random.default_rng(seed)

    def active(members: Index) -> float:
        batch = rng.choice(members, 16)
        steps = np.diff(experts.offset)[batch]
        union = np.bitwise_or.reduce(experts.bits[experts.offset[batch] + rng.integers(steps)])
        return float(np.bitwise_count(union).sum())

    clustered = [active(test[labels == label]) for label in range(8) for _ in range(100)]
    return change_pct(float(np.mean(clustered)), float(np.mean([active(test) for _ in range(800)])))


def _simulate_policies(
    trace: CalibrationTrace,
    variants: dict[str, Counts],
    members: Index,
    workers: int,
    options: Options,
    seed: int,
    *,
    in_order: bool = False,
    since: int = 0,
) -> dict[str, dict[str, float]]:
    """Return TPOT under each balancer, and under `marginal-cost` with each of the given signatures.

    Args:
        in_order: the members are the requests; otherwise requests are drawn from them.
        since: number of requests at the start that no figure includes.
    """
    cost: StepCost = options.cost or COST
    rng = np.random.default_rng([seed, workers])
    number = options.requests or PER_WORKER * workers
    kinds = members if in_order else rng.choice(members, number)
    experts = Experts.from_trace(trace)
    requests = requests_at_batch(trace, experts, kinds, workers, cost, rng)
    cluster = Cluster(decode=Decode(workers=workers, cost=cost))

    def tpot(policy: str, signatures: Experts) -> dict[str, float]:
        placement_policy = make_policy(policy)
        placement_policy.update_cost_model(cost)
        times = simulate(requests, placement_policy, cluster, experts=signatures, seed=seed).tpot_s[since:]
        # An answer of one token has no TPOT.
        return {f"tpot_p{q}_ms": 1e3 * float(np.nanpercentile(times, q)) for q in (50, 99)}

    outcomes = {name: tpot(name, experts) for name in BALANCERS}
    return outcomes | {
        name: tpot("marginal-cost", replace(experts, counts=c)) for name, c in variants.items()
    }


def _gains(options: Options, cases: Sequence[tuple[Any, ...]], run: Any) -> Rows:
    """Return a row per case and signature: changes against each seed's best balancer, and shares of gain."""
    rows: Rows = []
    for case, seeds in each_seed(options, cases, run):
        for name in seeds[0]:
            if name in BALANCERS:
                continue
            row: dict[str, Any] = {"workload": case[0], "workers": case[1] if len(case) > 1 else 8}
            row["signature"] = name
            for q in (50, 99):
                changes, true_changes = (
                    [change_pct(seed[key][f"tpot_p{q}_ms"], _best(seed, q)) for seed in seeds]
                    for key in (name, "true prefill")
                )
                row |= summarise_seeds(f"p{q}_change_pct", changes)
                row |= _share(f"p{q}_share_of_gain_pct", changes, true_changes)
            extra = [key for key in seeds[0][name] if key.endswith("cosine")]
            rows.append(row | {key: float(np.mean([seed[name][key] for seed in seeds])) for key in extra})
    return rows


def _share(key: str, changes: Sequence[float], true_changes: Sequence[float]) -> dict[str, float | None]:
    """Return the share of the true signature's mean gain, %, with an interval that resamples seeds."""
    if not np.mean(true_changes) < -1:
        return {key: None}
    if len(changes) < 2:
        return {key: 100 * changes[0] / true_changes[0]}
    # paired_change_percent is 0 for the whole gain, -100 for none.
    value, low, high = (
        100 + end for end in paired_change_percent(np.array(changes), np.array(true_changes), np.mean)
    )
    return {key: value, f"{key}_ci_low": low, f"{key}_ci_high": high}


def _best(outcomes: dict[str, dict[str, float]], q: int) -> float:
    return min(outcomes[name][f"tpot_p{q}_ms"] for name in BALANCERS)


_PLOT = bar_plot("{workers} workers: {signature}", "p50_change_pct")
FIGURES = {
    "methods": own_figure(
        "Prompts' experts predicted from their tokens: cosines and distinct experts, by method and prompts",
        methods,
        bar_plot("{method}, {prompts}", "decode_cosine"),
    ),
    "placement": own_figure(
        "TPOT of marginal-cost by true and by predicted signatures, by calibration prompts", placement, _PLOT
    ),
    "held-out": own_figure("The same for domains that the fit did not see", held_out, _PLOT),
    "shift": own_figure(
        "Domains change in mid-run to ones that the fit never saw, with and without online learning",
        shift,
        bar_plot("signature", "later_cosine"),
    ),
    "gptoss": own_figure("GPT-OSS-20B: decode experts predicted from the prompts' text", gptoss, _PLOT),
}
