"""Statistics of requests: quantiles, goodput, and their bootstrap intervals.

Sets with the same arrivals are resampled together, so that common chance effects cancel in their
difference. With few rounds of measurement, requests are resampled. With many rounds, whole rounds are
resampled, which also includes differences between rounds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from eldr_serve.arrays import Floats

# scipy.stats is imported where it is used. Each process of the load generator imports this module for
# LatencyObjective, and would take a second longer to start.
CONFIDENCE = 0.95
DRAWS = 2000
ROUNDS_TO_RESAMPLE = 4  # fewer rounds say too little about differences between rounds


class Interval(NamedTuple):
    """A value with its 95 % confidence interval."""

    value: float
    low: float
    high: float


def put_interval(row: dict[str, Any], name: str, figure: Interval | None) -> None:
    """Put a figure into a row as `name`, `name_low` and `name_high`, or None without a figure."""
    row[name], row[f"{name}_low"], row[f"{name}_high"] = figure or (None, None, None)


class LatencyObjective(NamedTuple):
    """The maximum TTFT and TPOT of a good request, ms."""

    ttft_ms: float
    tpot_ms: float

    def is_met_by(self, record: dict[str, Any]) -> bool:
        """Return whether a request has a first token, no error, and both times within the objective."""
        ttft_s, tpot_s = record.get("ttft_s"), record.get("tpot_s")
        if "error" in record or ttft_s is None:
            return False
        return bool(1000 * ttft_s <= self.ttft_ms and 1000 * (tpot_s or 0.0) <= self.tpot_ms)


def median_ci(values: Sequence[float]) -> Interval:
    """Return the median of independent values and its bootstrap interval, or NaN without values."""
    if len(values) < 2:
        return Interval(*[float(values[0]) if len(values) else math.nan] * 3)
    return _bootstrap(float(np.median(values)), (values,), np.median, seed=0)


def paired_change_percent(
    values: Floats, base: Floats, statistic: Callable[..., Any], *, seed: int = 0
) -> Interval:
    """Return the change of a statistic against a base, %; values and base of a unit are drawn together.

    Args:
        statistic: statistic(array, axis=...), as np.mean.
    """

    def change(sample: Floats, base_sample: Floats, axis: int = -1) -> Any:
        return 100 * (statistic(sample, axis=axis) / statistic(base_sample, axis=axis) - 1)

    return _bootstrap(float(change(values, base)), (values, base), change, seed)


def paired_ratio_percent(values: Sequence[float], base: Sequence[float]) -> Interval:
    """Return the mean change of paired values in %, with Student's t interval over the pairs.

    Mean and interval are computed on the logarithms of the ratios, so that swapping the two sides inverts the
    result. With fewer than two pairs the ends of the interval are NaN.
    """
    from scipy.stats import t

    with np.errstate(divide="ignore", invalid="ignore"):
        logs = np.log(np.asarray(values, float) / np.asarray(base, float))
    if not len(logs):
        return Interval(math.nan, math.nan, math.nan)
    mean, reach = float(logs.mean()), math.nan
    if len(logs) > 1:
        reach = float(t.ppf((1 + CONFIDENCE) / 2, len(logs) - 1) * logs.std(ddof=1) / math.sqrt(len(logs)))
    return Interval(*(100 * math.expm1(log) for log in (mean, mean - reach, mean + reach)))


def _bootstrap(value: float, samples: Sequence[Any], statistic: Callable[..., Any], seed: int) -> Interval:
    from scipy.stats import bootstrap

    resampled = bootstrap(
        samples,
        statistic,
        paired=len(samples) > 1,
        n_resamples=DRAWS,
        confidence_level=CONFIDENCE,
        method="percentile",
        rng=np.random.default_rng(seed),
    ).confidence_interval
    return Interval(value, float(resampled.low), float(resampled.high))


def interval(value: float, draws: Floats) -> Interval:
    """Return a value with the percentile interval of its bootstrap draws."""
    finite = draws[np.isfinite(draws)]
    if not len(finite):
        return Interval(float(value), math.nan, math.nan)
    low, high = np.quantile(finite, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return Interval(float(value), float(low), float(high))


def relative_percent(value: float, base: float, draws: Floats, base_draws: Floats) -> Interval:
    """Return the difference to a base in %. The draws of both use the same resamples."""
    with np.errstate(divide="ignore", invalid="ignore"):
        changes = 100 * (draws / base_draws - 1)
        change = 100 * (np.float64(value) / np.float64(base) - 1)
    return interval(float(change), changes)


def resampled_counts(
    rounds: NDArray[np.int_], *, draws: int = DRAWS, seed: int = 0, whole_rounds: bool | None = None
) -> NDArray[np.int32]:
    """Return [draws, units], how often each unit (an arrival) is in each bootstrap resample.

    Args:
        rounds: the round of each unit.
        whole_rounds: whether to resample whole rounds, instead of units within their round.
            None: rounds if there are ROUNDS_TO_RESAMPLE or more.
    """
    rng = np.random.default_rng(seed)
    names, owner = np.unique(rounds, return_inverse=True)
    if whole_rounds is None:
        whole_rounds = len(names) >= ROUNDS_TO_RESAMPLE
    if whole_rounds:
        share = np.full(len(names), 1 / len(names))
        return rng.multinomial(len(names), share, size=draws)[:, owner].astype(np.int32)
    counts = np.zeros((draws, len(rounds)), np.int32)
    for number in range(len(names)):
        members = np.flatnonzero(owner == number)
        counts[:, members] = rng.multinomial(len(members), np.full(len(members), 1 / len(members)), draws)
    return counts


@dataclass(frozen=True)
class Sample:
    """Values, each of a unit. A unit may have many (its tokens) or none (it failed)."""

    values: Floats
    units: NDArray[np.int_]

    def quantile(self, q: float) -> float:
        """Return a quantile of the values, or NaN without values."""
        return float(np.quantile(self.values, q)) if len(self.values) else float("nan")

    def resample(self, counts: NDArray[np.int32], quantiles: Sequence[float]) -> Floats:
        """Return [draws, quantiles] of the resamples, by linear interpolation as in np.quantile."""
        order = np.argsort(self.values, kind="stable")
        values, units = self.values[order], self.units[order]
        result = np.full((len(counts), len(quantiles)), np.nan)
        for row, drawn in enumerate(counts):
            ends = np.cumsum(drawn[units]) if len(units) else np.zeros(1, int)
            if not ends[-1]:
                continue
            places = np.asarray(quantiles) * (ends[-1] - 1)
            below = np.floor(places).astype(int)
            lower = values[np.searchsorted(ends, below, side="right")]
            upper = values[np.searchsorted(ends, np.minimum(below + 1, ends[-1] - 1), side="right")]
            result[row] = lower + (places - below) * (upper - lower)
        return result
