"""The result table of `barrier`: measured and simulated figures of each policy beside the baseline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks.lib.barrier.predicted import BarrierPrediction
from benchmarks.lib.barrier.trial import BarrierTrial
from eldr_serve.arrays import Floats
from loadgen.statistics import Interval, Sample, interval, put_interval, relative_percent, resampled_counts

BASE = "shortest-queue"
QUANTILES = (0.5, 0.99)
MEASURES = ("spread", "imbalance")
# With few rounds, intervals resample this many parts of each trial, since single steps are autocorrelated.
_BLOCKS = 20

Values = tuple[float, Floats]  # a figure, and its value in each resample


def policy_rows(
    trace: str,
    trials: Mapping[str, Sequence[BarrierTrial]],
    predictions: Mapping[str, Sequence[BarrierPrediction]],
    seed: int,
) -> list[dict[str, Any]]:
    """Return a row for each policy.

    `spread` is the difference between the largest and the smallest number of KV tokens of a rank. `imbalance`
    is the number of ranks times the largest number, minus the sum of all. Both are means over steps.
    `*_below` is the value of BASE divided by that of the policy, and `*_change_pct` is the change against
    BASE. Intervals resample rounds if there are four or more, else requests within rounds, and parts of
    trials.

    Args:
        trials, predictions: values of all rounds, by policy. A round has equal requests for all policies. The
            columns of a prediction are empty for a policy without predictions.
    """
    sent = max(trial.sent for rounds in trials.values() for trial in rounds)
    measured = {policy: _figures(rounds, sent, seed) for policy, rounds in trials.items()}
    simulated = {policy: _simulated(rounds) for policy, rounds in predictions.items()}
    rows = []
    for policy, policy_trials in trials.items():
        row = {"trace": trace, "policy": policy, **_counts(policy_trials)}
        for name, values in measured[policy].items():
            column, change = _compare(name, values, measured[BASE][name])
            put_interval(row, name, interval(*values))
            put_interval(row, column, None if policy == BASE else change)
            row[f"simulated_{name}"] = row[f"simulated_{column}"] = row[f"{name}_error_pct"] = None
            if policy not in simulated:
                continue
            expected = simulated[policy][name]
            row[f"simulated_{name}"] = expected
            row[f"{name}_error_pct"] = 100 * (expected / values[0] - 1)
            if policy != BASE:
                _, expected_change = _compare(name, _exact(expected), _exact(simulated[BASE][name]))
                row[f"simulated_{column}"] = expected_change.value
        rows.append(row)
    return rows


def _counts(trials: Sequence[BarrierTrial]) -> dict[str, Any]:
    """Return sums and means that have no interval."""
    steps = [trial.steps for trial in trials]
    return {
        "rounds": len(trials),
        "requests": sum(len(trial.tpot_ms) for trial in trials),
        "failures": sum(sum(trial.errors.values()) for trial in trials),
        "steps": sum(len(s.seconds) for s in steps),
        "batch_size": float(np.mean(np.concatenate([s.requests for s in steps]))),
        "kv_tokens": float(np.mean(np.concatenate([s.kv_tokens for s in steps]))),
        "step_ms": 1e3 * float(np.nanmean(np.concatenate([s.seconds for s in steps]))),
        "tokens_per_s": float(np.mean([s.tokens_per_s for s in steps])),
        "ttft_p50_ms": float(np.nanmedian(np.concatenate([trial.ttft_ms for trial in trials]))),
    }


def _figures(trials: Sequence[BarrierTrial], sent: int, seed: int) -> dict[str, Values]:
    """Return the quantiles of TPOT and the means of MEASURES. No trial sent more than `sent` requests."""
    return _times(trials, sent, seed) | _imbalances(trials, seed)


def _times(trials: Sequence[BarrierTrial], sent: int, seed: int) -> dict[str, Values]:
    """Return the quantiles of TPOT in ms. Requests with the same number in a round are resampled together."""
    counts = resampled_counts(np.repeat(np.arange(len(trials)), sent), seed=seed)
    ms = np.concatenate([trial.tpot_ms for trial in trials])
    units = np.concatenate([sent * round_ + trial.number for round_, trial in enumerate(trials)])
    known = np.isfinite(ms)  # an answer of one token has no time per token
    sample = Sample(ms[known], units[known])
    draws = sample.resample(counts, QUANTILES)
    return {_quantile_name(q): (sample.quantile(q), draws[:, n]) for n, q in enumerate(QUANTILES)}


def _imbalances(trials: Sequence[BarrierTrial], seed: int) -> dict[str, Values]:
    """Return the means over steps of MEASURES."""
    counts = resampled_counts(np.repeat(np.arange(len(trials)), _BLOCKS), seed=seed)
    figures = {}
    for name in MEASURES:
        by_trial = [getattr(trial.steps, name) for trial in trials]
        parts = [part for steps in by_trial for part in np.array_split(steps, _BLOCKS)]
        sums, sizes = (np.array([float(measure(part)) for part in parts]) for measure in (np.sum, len))
        figures[f"{name}_tokens"] = (float(sums.sum() / sizes.sum()), (counts @ sums) / (counts @ sizes))
    return figures


def _simulated(predictions: Sequence[BarrierPrediction]) -> dict[str, float]:
    """Return the simulated values of the same figures, over all rounds."""
    ms = np.concatenate([prediction.tpot_ms for prediction in predictions])
    figures = {_quantile_name(q): float(np.quantile(ms, q)) for q in QUANTILES}
    means = {f"{name}_tokens": float(np.mean([getattr(p, name) for p in predictions])) for name in MEASURES}
    return figures | means


def _quantile_name(q: float) -> str:
    return f"tpot_p{100 * q:.0f}_ms"


def _exact(value: float) -> Values:
    return value, np.array([value])


def _compare(name: str, values: Values, base: Values) -> tuple[str, Interval]:
    """Return the column of the comparison with BASE, and its value."""
    if name.endswith("_ms"):
        return f"{name}_change_pct", relative_percent(values[0], base[0], values[1], base[1])
    with np.errstate(divide="ignore"):
        times = np.divide(base[0], values[0]), np.divide(base[1], values[1])
    return f"{name.removesuffix('_tokens')}_below", interval(*times)
