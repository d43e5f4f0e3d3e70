"""The figures of a comparison: one row per policy, each value with its interval and against a baseline."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from eldr_serve.arrays import Floats
from eldr_serve.scheduling.policies.registry import balancer_names
from loadgen.statistics import (
    ROUNDS_TO_RESAMPLE,
    Interval,
    LatencyObjective,
    Sample,
    interval,
    paired_ratio_percent,
    put_interval,
    relative_percent,
    resampled_counts,
)
from loadgen.trial import Trial

BASELINES = balancer_names()
TIMES = ("ttft", "tpot", "itl", "end", "handover")
QUANTILES = (0.5, 0.99)
# Figures of decode steps by name: (numerator, denominator, factor), where the first two are engine totals.
STEPS = {
    "active_experts": ("active_experts", "steps", 1),
    "experts_per_token": ("active_experts", "requests", 1),  # each request of a step gets one token
    "engine_ms_per_token": ("seconds", "requests", 1000),
    "step_ms_per_token": ("token_seconds", "requests", 1000),
}


def describe_intervals(rounds: int) -> str:
    """Describe how the intervals are computed."""
    steps = "intervals of step figures: 95 %, Student's t over the paired rounds; "
    if rounds >= ROUNDS_TO_RESAMPLE:
        return f"{steps}of the client's figures: 95 %, cluster bootstrap over {rounds} rounds"
    return (
        f"{steps}of the client's figures: 95 %, bootstrap over requests within {rounds} round(s); "
        f"they do not include differences between rounds (from {ROUNDS_TO_RESAMPLE} rounds on they do)"
    )


def policy_rows(
    policies: list[str],
    trials: list[Trial],
    *,
    warm_up_s: int,
    seconds: int,
    objective: LatencyObjective,
    seed: int,
) -> list[dict[str, Any]]:
    """Return one row per policy, in the order of `policies`. Missing figures are None.

    Changes of STEPS are means over rounds. The trial of a policy is paired with the baseline's trial in that
    round. The baseline of `*_change_pct` is the best in that figure of the BASELINES that ran. The best of
    several equivalent baselines is biased low. `*_pooled_change_pct` is relative to the requests of all
    baselines together, if there are several.
    """
    records = {p: measured_records(p, trials, warm_up_s, seconds) for p in policies}
    arrivals = sorted({(round_, r["number"]) for of_policy in records.values() for round_, r in of_policy})
    unit = {arrival: number for number, arrival in enumerate(arrivals)}
    counts = resampled_counts(np.array([round_ for round_, _ in arrivals], int), seed=seed)
    measured_s = seconds * len({round_ for round_, _ in arrivals}) or math.nan
    rows = [
        _counts(p, [trial for trial in trials if trial.policy == p], [record for _, record in records[p]])
        for p in policies
    ]

    def add(name: str, values: list[tuple[float, Floats]], *, more_is_better: bool = False) -> None:
        best = _best(policies, [value for value, _ in values], more_is_better)
        for number, (row, (value, draws)) in enumerate(zip(rows, values, strict=True)):
            put_interval(row, name, interval(value, draws))
            if best is not None and best != number:
                change = relative_percent(value, values[best][0], draws, values[best][1])
                put_interval(row, f"{name}_change_pct", change)
                row[f"{name}_baseline"] = policies[best]

    baselines = [p for p in policies if _is_baseline(p)]
    for key in TIMES:
        samples = [_sample(records[p], unit, key) for p in policies]
        draws_by_policy = [s.resample(counts, QUANTILES) for s in samples]
        if len(baselines) > 1:
            pool = _sample([record for p in baselines for record in records[p]], unit, key)
            pool_drawn = pool.resample(counts, QUANTILES)
        for column, q in enumerate(QUANTILES):
            name = f"{key}_p{100 * q:.0f}_ms"
            values = [(s.quantile(q), d[:, column]) for s, d in zip(samples, draws_by_policy, strict=True)]
            add(name, values)
            if len(baselines) > 1:
                for row, (value, draws) in zip(rows, values, strict=True):
                    change = relative_percent(value, pool.quantile(q), draws, pool_drawn[:, column])
                    put_interval(row, f"{name}_pooled_change_pct", change)
    for name in STEPS:
        by_round = [step_figure_by_round(p, trials, name) for p in policies]
        best = _best(policies, [row[name] for row in rows], more_is_better=False)
        for number, row in enumerate(rows):
            if best is not None and best != number:
                put_interval(row, f"{name}_change_pct", _paired_change(by_round[number], by_round[best]))
                row[f"{name}_baseline"] = policies[best]
    good = [_good(records[p], unit, objective) for p in policies]
    add("goodput_rps", [(g.sum() / measured_s, counts @ g / measured_s) for g in good], more_is_better=True)
    return [{key: _finite_or_none(value) for key, value in row.items()} for row in rows]


def measured_records(
    policy: str, trials: list[Trial], warm_up_s: int, seconds: int
) -> list[tuple[int, dict[str, Any]]]:
    """Return the measured requests of a policy, each with the round of its trial."""
    of_policy = [trial for trial in trials if trial.policy == policy]
    return [(trial.round, r) for trial in of_policy for r in trial.measured_requests(warm_up_s, seconds)]


def tpot_by_domain(policy: str, trials: list[Trial], *, warm_up_s: int, seconds: int) -> list[dict[str, Any]]:
    """Return a row for each domain: the policy's measured requests that have a TPOT, its p50 and p99."""
    times: dict[str, list[float]] = {}
    for _, record in measured_records(policy, trials, warm_up_s, seconds):
        if "error" not in record and record.get("tpot_s") is not None:
            times.setdefault(record.get("domain", ""), []).append(1000 * record["tpot_s"])
    return [
        {"domain": domain, "requests": len(ms)}
        | {f"tpot_p{100 * q:.0f}_ms": float(np.quantile(ms, q)) for q in QUANTILES}
        for domain, ms in sorted(times.items())
    ]


def step_figure_by_round(policy: str, trials: list[Trial], name: str) -> dict[int, float]:
    """Return one of STEPS for each round of a policy. Rounds without reported steps are left out."""
    above, below, factor = STEPS[name]
    return {
        trial.round: factor * trial.engines[above] / trial.engines[below]
        for trial in trials
        if trial.policy == policy and trial.engines and trial.engines[below]
    }


def changes_by_round(policy: str, baseline: str, trials: list[Trial], name: str) -> list[float]:
    """Return the changes of one of STEPS against the baseline, %, one for each common round."""
    values, base = (step_figure_by_round(p, trials, name) for p in (policy, baseline))
    return [100 * (values[round_] / base[round_] - 1) for round_ in sorted(values.keys() & base.keys())]


def _paired_change(values: dict[int, float], base: dict[int, float]) -> Interval:
    rounds = sorted(values.keys() & base.keys())
    return paired_ratio_percent([values[r] for r in rounds], [base[r] for r in rounds])


def _counts(policy: str, trials: list[Trial], requests: list[dict[str, Any]]) -> dict[str, Any]:
    late = [1000 * r["late_s"] for r in requests if r["late_s"] is not None]
    engines = [trial.engines for trial in trials if trial.engines]
    names = ("steps", "requests", "active_experts", "seconds", "token_seconds")
    totals = {key: sum(e[key] for e in engines) for key in names}
    placements, best = sum(trial.placed for trial in trials), sum(trial.best for trial in trials)
    return {
        "policy": policy,
        "requests": len(requests),
        "failures": sum("error" in r for trial in trials for r in trial.requests),
        "late_p99_ms": float(np.quantile(late, 0.99)) if late else math.nan,
        "batch_size": totals["requests"] / (totals["steps"] or math.nan),
        **{
            name: factor * totals[above] / (totals[below] or math.nan)
            for name, (above, below, factor) in STEPS.items()
        },
        # Without a table no worker is known to be the most similar.
        "most_similar_worker_share": best / placements if best else math.nan,
    }


def _sample(records: list[tuple[int, dict[str, Any]]], unit: dict[tuple[int, int], int], key: str) -> Sample:
    values: list[float] = []
    units: list[int] = []
    for round_, record in records:
        measured = None if "error" in record else record.get(f"{key}_s")
        for value in measured if isinstance(measured, list) else [] if measured is None else [measured]:
            values.append(1000 * value)
            units.append(unit[round_, record["number"]])
    return Sample(np.array(values, float), np.array(units, int))


def _good(
    records: list[tuple[int, dict[str, Any]]],
    unit: dict[tuple[int, int], int],
    objective: LatencyObjective,
) -> Floats:
    good = np.zeros(len(unit))
    for round_, record in records:
        good[unit[round_, record["number"]]] = objective.is_met_by(record)
    return good


def _best(policies: list[str], values: list[float], more_is_better: bool) -> int | None:
    candidates = [n for n, p in enumerate(policies) if _is_baseline(p) and math.isfinite(values[n])]
    choose: Callable[..., int] = max if more_is_better else min
    return choose(candidates, key=values.__getitem__) if candidates else None


def _is_baseline(policy: str) -> bool:
    return policy.partition(":")[0] in BASELINES


def _finite_or_none(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
