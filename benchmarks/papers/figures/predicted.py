"""Signatures predicted from prompts' tokens: how true they are, and what placement gains by them.

A run fits predictors on some prompts of a capture (a calibration trace with routes and token ids) and
measures on others. Costs and workers are those of `eldr`'s figures, without prefill workers: requests are
placed as they arrive, whatever their signature is, so that only its content differs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from transformers import AutoTokenizer

from benchmarks.papers.figures.common import Figure, Options, Rows, bar_plot, change_pct, each_seed
from benchmarks.papers.figures.eldr import BALANCERS, COST, TASKS
from benchmarks.papers.signature_methods import Prompts, chi_square_ridge, methods_for
from eldr_serve.command_errors import BadInput
from eldr_serve.experts.calibration_trace import CalibrationTrace
from eldr_serve.experts.fitting.clustering import balanced_kmeans
from eldr_serve.experts.fitting.quality import inverse_document_frequency
from eldr_serve.experts.online_predictor import OnlinePredictor
from eldr_serve.experts.signature import SignatureSpec
from eldr_serve.experts.signature_predictor import SignaturePredictor
from eldr_serve.scheduling import StepCost, make_policy
from examples.demo_model import WEIGHTS
from loadgen.statistics import paired_change_percent
from offline.gptoss import read_gptoss, read_records
from offline.predictor import agreement, expert_frequencies, fit_signature_predictor, token_shares
from offline.scenario import observed, routes_of
from offline.simulation.cluster import Cluster, Decode
from offline.simulation.requests import Experts, Requests
from offline.simulation.run import simulate

GROUPS = ("all", "language", "task")
SIZES = (50, 100, 300, 1000)  # calibration prompts
USUAL = 300
WORKERS = (8, 16)
BATCH = 16  # mean requests a worker that arrivals aim at
PER_WORKER = 150  # requests
MEASURED = 500  # prompts that methods are compared on
LEARNT = 600  # prompts of a stream before, and after, its domains change
Counts = NDArray[np.float32]
Floats = NDArray[np.float64]
Index = NDArray[np.int64]


def methods(options: Options) -> Rows:
    """Every method fitted on 300 prompts, and the served one on fewer and more."""
    prompts = _prompts(options)
    known = methods_for(prompts.trace)
    experts = Experts.replayed(prompts.trace)
    served = "served predictor, rank 64"
    cases = [(group, name, USUAL) for group in GROUPS for name in known]
    cases += [(group, served, size) for group in GROUPS for size in SIZES if size != USUAL]

    def run(case: tuple[str, str, int], seed: int) -> dict[str, float]:
        group, name, size = case
        fit, test = _split(prompts.trace, group, size, seed)
        test = test[:MEASURED]
        predicted = known[name](prompts[fit], prompts[test])
        return _accuracy(prompts, fit, test, predicted) | {
            "cluster_experts_pct": _cluster_experts_pct(prompts.trace, experts, fit, test, predicted, seed)
        }

    rows: Rows = []
    for (group, name, size), found in each_seed(options, cases, run):
        row: dict[str, Any] = {"workload": group, "method": name, "prompts": size}
        for key in found[0]:
            row |= _over_seeds(key, [one[key] for one in found])
        rows.append(row)
    return rows


def placement(options: Options) -> Rows:
    """`marginal-cost` told true and predicted signatures, against the best balancer."""
    prompts = _prompts(options)
    trace = prompts.trace

    def run(case: tuple[str, int], seed: int) -> dict[str, dict[str, float]]:
        group, workers = case
        _, test = _split(trace, group, max(SIZES), seed)
        told = {"true prefill": trace.prefill_counts.astype(np.float32)}
        told["true decode"] = _as_counts(trace, trace.decode_probability)
        for size in SIZES:
            fit, _ = _split(trace, group, size, seed)
            told[f"predicted, {size} prompts"] = _predicted(trace, _fitted(trace, fit), test)
        return _placed(trace, told, test, workers, options, seed)

    return _gains(options, [(group, k) for group in GROUPS for k in WORKERS], run)


def held_out(options: Options) -> Rows:
    """Each domain predicted by a fit on 300 prompts of the workload's other domains."""
    trace = _prompts(options).trace

    def run(case: tuple[str, int], seed: int) -> dict[str, dict[str, float]]:
        group, workers = case
        fit, test = _split(trace, group, USUAL, seed)
        among = _members(trace, group)
        strange = np.zeros(trace.prefill_counts.shape, np.float32)
        for part in _domains(trace, among):
            rest = np.random.default_rng(seed).permutation(np.setdiff1d(among, part))[:USUAL]
            mine = np.intersect1d(part, test)
            strange[mine] = _predicted(trace, _fitted(trace, rest), mine)[mine]
        told = {
            "true prefill": trace.prefill_counts.astype(np.float32),
            "predicted, own domain seen": _predicted(trace, _fitted(trace, fit), test),
            "predicted, own domain not seen": strange,
        }
        return _placed(trace, told, test, workers, options, seed)

    return _gains(options, list(product(("language", "task"), WORKERS)), run)


def shift(options: Options) -> Rows:
    """Half of the domains give way to the other half, of which the fit saw nothing; with a refit online."""
    trace = _prompts(options).trace

    def run(case: str, seed: int) -> dict[str, dict[str, float]]:
        rng = np.random.default_rng(seed)
        among = _members(trace, case)
        parts = _domains(trace, among)
        halves = np.array_split(rng.permutation(len(parts)), 2)
        before, after = (rng.permutation(np.concatenate([parts[n] for n in half])) for half in halves)
        fit, stream = before[:USUAL], np.concatenate([before[USUAL:][:LEARNT], after[:LEARNT]])
        predictor = _fitted(trace, fit)
        told = {"true prefill": trace.prefill_counts.astype(np.float32)}
        told["frozen"] = _predicted(trace, predictor, stream)
        told["online"] = _online(trace, predictor, stream)
        told["mean of recent prompts"] = _recent_mean(trace, predictor, stream)
        changed = len(before[USUAL:][:LEARNT])
        found = _placed(trace, told, stream, 8, options, seed, in_order=True, since=changed)
        for name, counts in told.items():
            for part, (start, end) in {
                "before": (0, changed), "first_100": (changed, changed + 100),
                "later": (changed + LEARNT // 2, len(stream)),
            }.items():  # fmt: skip
                there = stream[start:end]
                frequency, truth, mean = (
                    _flat(trace, c, there)
                    for c in (counts, trace.prefill_counts, told["mean of recent prompts"])
                )
                found[name][f"{part}_cosine"] = agreement(frequency, truth, mean)["cosine"]
        return found

    return _gains(
        options, [(group,) for group in ("language", "task")], lambda case, seed: run(case[0], seed)
    )


def gptoss(options: Options) -> Rows:
    """GPT-OSS-20B: its prompts' text, by another model's tokenizer, foretells its decode; by five folds."""
    prompts = _gptoss_prompts(options.trace("GPT-OSS-20B records"))
    trace = prompts.trace
    everyone = np.arange(len(trace.ids))
    decode = _decode(trace)

    def run(case: tuple[str, int], seed: int) -> dict[str, dict[str, float]]:
        predicted, means = np.zeros_like(prompts.frequencies), np.zeros_like(prompts.frequencies)
        for part in np.array_split(np.random.default_rng(seed).permutation(everyone), 5):
            rest = np.setdiff1d(everyone, part)
            predicted[part] = chi_square_ridge(prompts[rest], prompts[part])
            means[part] = decode[rest].mean(axis=0)
        told: dict[str, Floats] = {
            "true prefill": prompts.frequencies,
            "true decode": decode,
            "predicted, four fifths": np.maximum(predicted, 0),
        }
        counts = {name: _as_counts(trace, frequency) for name, frequency in told.items()}
        found = _placed(trace, counts, everyone, case[1], options, seed)
        for name, frequency in told.items():
            found[name]["cosine"] = agreement(frequency, decode, means)["cosine"]
        return found

    return _gains(options, [("GPT-OSS-20B", k) for k in WORKERS], run)


# -- prompts ----------------------------------------------------------------------------------------


def _prompts(options: Options) -> Prompts:
    path = options.trace("a calibration trace with routes and token ids (offline.calibrate --routes)")
    trace = observed(routes_of(path))
    if trace.routes is None or trace.token_ids is None:
        raise BadInput(f"{path} has no routes or no token ids; make it with offline.calibrate --routes")
    return Prompts.of(trace)


def _members(trace: CalibrationTrace, group: str) -> Index:
    task = np.isin(trace.domains, TASKS)
    found = np.flatnonzero({"all": np.ones_like(task), "language": ~task, "task": task}[group])
    if len(found) <= 2 * USUAL:
        raise BadInput(f"the trace has {len(found)} prompts of the workload {group}, too few")
    return found


def _split(trace: CalibrationTrace, group: str, size: int, seed: int) -> tuple[Index, Index]:
    """Prompts to fit on, nested by size, and those to measure with, the same for every size."""
    order = np.random.default_rng(seed).permutation(_members(trace, group))
    most = min(max(SIZES), len(order) // 2)
    return order[: min(size, most)], order[most:]


def _domains(trace: CalibrationTrace, among: Index) -> list[Index]:
    """The prompts of each domain; those of less than 50 prompts together."""
    names = np.array(trace.domains)[among]
    parts = [among[names == name] for name in np.unique(names)]
    rare = [part for part in parts if len(part) < 50]
    return [part for part in parts if len(part) >= 50] + ([np.concatenate(rare)] if rare else [])


def _gptoss_prompts(path: Path) -> Prompts:
    """The records whose prompt is given; their first steps stand in for prefill, as in `read_gptoss`.

    Tokens are the demo model's: GPT-OSS's tokenizer is not at hand.
    """
    tokenizer = AutoTokenizer.from_pretrained(WEIGHTS)
    text = {str(r["id"]): r["prompt"] for r, _ in read_records(path) if r.get("prompt")}
    trace = read_gptoss(path)
    kept = np.flatnonzero([name in text for name in trace.ids])
    offsets = np.concatenate([[0], np.cumsum(trace.decode_steps[kept], dtype=np.int64)])
    trace = replace(trace.subset(kept), routes=trace.decode_routes(kept), route_offsets=offsets)
    tokens = [np.array(tokenizer.encode(text[name])) for name in trace.ids]
    return Prompts(trace, token_shares(tokens, len(tokenizer)), expert_frequencies(trace))


# -- signatures -------------------------------------------------------------------------------------


def _fitted(trace: CalibrationTrace, fit: Index) -> SignaturePredictor:
    return fit_signature_predictor(trace.subset(fit))[0]


def _predicted(trace: CalibrationTrace, predictor: SignaturePredictor, members: Index) -> Counts:
    """float32[N, L, E], counts of the members; zeros elsewhere."""
    prompts = trace.prompts
    found = np.zeros(trace.prefill_counts.shape, np.float32)
    for member in members:
        found[member] = predictor.predict(prompts[member])
    return found


def _recent_mean(trace: CalibrationTrace, predictor: SignaturePredictor, stream: Index) -> Counts:
    """Of each prompt of the stream, what the mean of those shortly before it would say."""
    found = np.zeros(trace.prefill_counts.shape, np.float32)
    mean = predictor.mean.copy()
    for member in stream:
        tokens = trace.prompt_tokens[member]
        found[member] = tokens * mean
        mean += (trace.prefill_counts[member] / tokens - mean) / 64
    return found


def _online(trace: CalibrationTrace, predictor: SignaturePredictor, stream: Index) -> Counts:
    """Each prompt is predicted, then its true counts learnt; the recent mean while the predictor is off."""
    prompts = trace.prompts
    online = OnlinePredictor(predictor)
    found = _recent_mean(trace, predictor, stream)
    for member in stream:
        predicted = online.predict(prompts[member])
        if predicted is not None:
            found[member] = predicted
        online.observe(prompts[member], trace.prefill_counts[member])
    return found


def _as_counts(trace: CalibrationTrace, frequencies: NDArray[Any]) -> Counts:
    """float32[N, L, E] of frequencies [N, L*E]: as if each prompt token had used the experts so often."""
    shape = trace.prefill_counts.shape
    counts: Counts = (frequencies.reshape(shape) * trace.prompt_tokens[:, None, None]).astype(np.float32)
    return counts


def _decode(trace: CalibrationTrace) -> Floats:
    """float64[N, L*E], what decode used."""
    return trace.decode_probability.reshape(len(trace.ids), -1).astype(np.float64)


def _flat(trace: CalibrationTrace, counts: NDArray[Any], members: Index) -> Floats:
    """float64[n, L*E], frequencies."""
    found: NDArray[np.float64] = (
        counts[members].reshape(len(members), -1) / trace.prompt_tokens[members, None]
    )
    return found


# -- measures ---------------------------------------------------------------------------------------


def _accuracy(prompts: Prompts, fit: Index, test: Index, predicted: Floats) -> dict[str, float]:
    """Against the truth of decode, and of prefill; deviations from the means of the prompts fitted on."""
    decode = _decode(prompts.trace)
    mean = prompts.frequencies[fit].mean(axis=0)
    found = agreement(predicted, prompts.frequencies[test], mean)
    shifted = predicted - mean + decode[fit].mean(axis=0)
    return {
        "decode_cosine": agreement(shifted, decode[test], decode[fit].mean(axis=0))["cosine"],
        "prefill_cosine": found["cosine"],
        "prefill_gain": found["gain"],
    }


def _cluster_experts_pct(
    trace: CalibrationTrace,
    experts: Experts,
    fit: Index,
    test: Index,
    predicted: Floats,
    seed: int,
) -> float:
    """Distinct experts of batches of 16 within 8 clusters of signatures, against batches of all, %."""
    idf = inverse_document_frequency(trace.prefill_counts[fit])
    spec = SignatureSpec(idf, np.arange(len(idf)))
    points = spec.encode(predicted.reshape(-1, *idf.shape))
    labels = balanced_kmeans(points, 8, seed=seed).labels
    rng = np.random.default_rng(seed)

    def active(members: Index) -> float:
        chosen = rng.choice(members, 16)
        steps = np.diff(experts.offset)[chosen]
        union = np.bitwise_or.reduce(experts.bits[experts.offset[chosen] + rng.integers(steps)])
        return float(np.bitwise_count(union).sum())

    clustered = [active(test[labels == label]) for label in range(8) for _ in range(100)]
    return change_pct(float(np.mean(clustered)), float(np.mean([active(test) for _ in range(800)])))


def _placed(
    trace: CalibrationTrace,
    told: dict[str, Counts],
    members: Index,
    workers: int,
    options: Options,
    seed: int,
    *,
    in_order: bool = False,
    since: int = 0,
) -> dict[str, dict[str, float]]:
    """TPOT under each balancer, and of `marginal-cost` by the signatures that it is told.

    Args:
        in_order: the members are the requests; else requests are drawn from them.
        since: requests before this one are not counted.
    """
    cost: StepCost = options.cost or COST
    rng = np.random.default_rng([seed, workers])
    number = options.requests or PER_WORKER * workers
    kinds = members if in_order else rng.choice(members, number)
    experts = Experts.replayed(trace)
    output = trace.decode_steps[kinds].astype(np.int64)
    unions = [np.bitwise_or.reduce(experts.bits[experts.offset[rng.choice(kinds, BATCH)]]) for _ in range(64)]
    active = float(np.mean([np.bitwise_count(union).sum() for union in unions]))
    stay_s = float(output.mean() * cost.seconds(BATCH, BATCH * float(trace.prompt_tokens.mean()), active))
    arrival_s = np.cumsum(rng.exponential(stay_s / (workers * BATCH), len(kinds)))
    requests = Requests(arrival_s, trace.prompt_tokens[kinds].astype(np.int64), output, kinds)
    cluster = Cluster(decode=Decode(workers=workers, cost=cost))

    def tpot(policy: str, signatures: Experts) -> dict[str, float]:
        made = make_policy(policy)
        made.update_cost_model(cost)
        times = simulate(requests, made, cluster, experts=signatures, seed=seed).tpot_s[since:]
        # An answer of one token has none.
        return {f"tpot_p{q}_ms": 1e3 * float(np.nanpercentile(times, q)) for q in (50, 99)}

    found = {name: tpot(name, experts) for name in BALANCERS}
    return found | {name: tpot("marginal-cost", replace(experts, counts=c)) for name, c in told.items()}


def _gains(options: Options, cases: Sequence[tuple[Any, ...]], run: Any) -> Rows:
    """A row a case and signature: changes against each seed's best balancer, and shares of the true gain."""
    rows: Rows = []
    for case, found in each_seed(options, cases, run):
        for name in found[0]:
            if name in BALANCERS:
                continue
            row: dict[str, Any] = {"workload": case[0], "workers": case[1] if len(case) > 1 else 8}
            row["signature"] = name
            for q in (50, 99):
                mine, true = (
                    [change_pct(seed[key][f"tpot_p{q}_ms"], _best(seed, q)) for seed in found]
                    for key in (name, "true prefill")
                )
                row |= _over_seeds(f"p{q}_change_pct", mine)
                row |= _share(f"p{q}_share_of_gain_pct", mine, true)
            extra = [key for key in found[0][name] if key.endswith("cosine")]
            rows.append(row | {key: float(np.mean([seed[name][key] for seed in found])) for key in extra})
    return rows


def _share(key: str, mine: Sequence[float], true: Sequence[float]) -> dict[str, float | None]:
    """Of the true signature's mean gain, %, with the interval of seeds drawn together."""
    if not np.mean(true) < -1:
        return {key: None}
    if len(mine) < 2:
        return {key: 100 * mine[0] / true[0]}
    # A change of -100 % would be no gain at all.
    value, low, high = (100 + end for end in paired_change_percent(np.array(mine), np.array(true), np.mean))
    return {key: value, f"{key}_ci_low": low, f"{key}_ci_high": high}


def _best(found: dict[str, dict[str, float]], q: int) -> float:
    return min(found[name][f"tpot_p{q}_ms"] for name in BALANCERS)


def _over_seeds(key: str, values: Sequence[float]) -> dict[str, float]:
    """Mean, lowest and highest."""
    return {key: float(np.mean(values)), f"{key}_lowest": min(values), f"{key}_highest": max(values)}


_NOT_IN_PAPERS = "not in the papers"
FIGURES = {
    "methods": Figure(
        "Prompts' experts foretold from their tokens: cosines and distinct experts, by method and prompts",
        _NOT_IN_PAPERS,
        methods,
        bar_plot("{method}, {prompts}", "decode_cosine"),
    ),
    "placement": Figure(
        "TPOT of marginal-cost by true and by predicted signatures, by calibration prompts",
        _NOT_IN_PAPERS,
        placement,
        bar_plot("{workers} workers: {signature}", "p50_change_pct"),
    ),
    "held-out": Figure(
        "The same where no prompt's domain was fitted on",
        _NOT_IN_PAPERS,
        held_out,
        bar_plot("{workers} workers: {signature}", "p50_change_pct"),
    ),
    "shift": Figure(
        "Domains that the fit never saw take over in mid-run, with and without learning online",
        _NOT_IN_PAPERS,
        shift,
        bar_plot("signature", "later_cosine"),
    ),
    "gptoss": Figure(
        "GPT-OSS-20B: decode experts foretold from the prompts' text",
        _NOT_IN_PAPERS,
        gptoss,
        bar_plot("{workers} workers: {signature}", "p50_change_pct"),
    ),
}
