"""Figures of a set of requests: quantiles, goodput, and how sure they are (bootstrap).

Sets that met the same arrivals are resampled together, so that what both met by chance cancels in
their difference. With few rounds of measurement requests are resampled; with many the rounds are,
which also holds what differs from round to round but not from request to request.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

CONFIDENCE = 0.95
DRAWS = 2000
ROUNDS_TO_RESAMPLE = 4  # fewer rounds say too little of how rounds differ

Floats = NDArray[np.float64]


class Interval(NamedTuple):
    """A value with its bootstrap confidence interval."""

    value: float
    low: float
    high: float


class Slo(NamedTuple):
    """What a request must keep to be good: both times, in ms."""

    ttft_ms: float
    tpot_ms: float

    def met(self, record: dict[str, Any]) -> bool:
        """A request that failed, or has no first token, is not good; one token has no TPOT to miss."""
        ttft_s, tpot_s = record.get("ttft_s"), record.get("tpot_s")
        if "error" in record or ttft_s is None:
            return False
        return bool(1000 * ttft_s <= self.ttft_ms and 1000 * (tpot_s or 0.0) <= self.tpot_ms)


def median_ci(
    values: Sequence[float], *, confidence: float = CONFIDENCE, draws: int = DRAWS, seed: int = 0
) -> Interval:
    """Median and its bootstrap confidence interval."""
    return quantile_ci(values, 0.5, confidence=confidence, draws=draws, seed=seed)


def quantile_ci(
    values: Sequence[float], q: float, *, confidence: float = CONFIDENCE, draws: int = DRAWS, seed: int = 0
) -> Interval:
    """Quantile q of independent values and its bootstrap confidence interval; NaN without values."""
    sample = Sample(np.asarray(values, float), np.arange(len(values)))
    counts = resampled_counts(np.zeros(len(values), int), draws=draws, seed=seed, whole_rounds=False)
    return interval(sample.quantile(q), sample.resampled(counts, [q])[:, 0], confidence)


def interval(value: float, draws: Floats, confidence: float = CONFIDENCE) -> Interval:
    """A value with the percentile interval of its bootstrap draws."""
    known = draws[np.isfinite(draws)]
    if not len(known):
        return Interval(float(value), float("nan"), float("nan"))
    low, high = np.quantile(known, [(1 - confidence) / 2, (1 + confidence) / 2])
    return Interval(float(value), float(low), float(high))


def relative_percent(
    value: float, base: float, draws: Floats, base_draws: Floats, confidence: float = CONFIDENCE
) -> Interval:
    """Difference to a base in % of it; draws of both by the same resamples."""
    with np.errstate(divide="ignore", invalid="ignore"):
        changes = 100 * (draws / base_draws - 1)
        change = 100 * (np.float64(value) / np.float64(base) - 1)
    return interval(float(change), changes, confidence)


def resampled_counts(
    rounds: NDArray[np.int_], *, draws: int = DRAWS, seed: int = 0, whole_rounds: bool | None = None
) -> NDArray[np.int32]:
    """[draws, units]: how often each unit (an arrival) is in each bootstrap resample.

    Args:
        rounds: the round of each unit.
        whole_rounds: resample rounds with all their units; else units within their round.
            None: rounds where there are ROUNDS_TO_RESAMPLE or more.
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
    """Values, each of a unit; a unit may have many (its tokens) or none (it failed)."""

    values: Floats
    units: NDArray[np.int_]

    def quantile(self, q: float) -> float:
        """NaN without values."""
        return float(np.quantile(self.values, q)) if len(self.values) else float("nan")

    def resampled(self, counts: NDArray[np.int32], quantiles: Sequence[float]) -> Floats:
        """[draws, quantiles] of the resamples, by linear interpolation as in np.quantile."""
        order = np.argsort(self.values, kind="stable")
        values, units = self.values[order], self.units[order]
        found = np.full((len(counts), len(quantiles)), np.nan)
        for row, drawn in enumerate(counts):
            ends = np.cumsum(drawn[units]) if len(units) else np.zeros(1, int)
            if not ends[-1]:
                continue
            places = np.asarray(quantiles) * (ends[-1] - 1)
            below = np.floor(places).astype(int)
            lower = values[np.searchsorted(ends, below, side="right")]
            upper = values[np.searchsorted(ends, np.minimum(below + 1, ends[-1] - 1), side="right")]
            found[row] = lower + (places - below) * (upper - lower)
        return found


def summary(
    records: Iterable[dict[str, Any]], keys: Sequence[str], quantiles: Sequence[float] = (0.5, 0.99)
) -> dict[str, float]:
    """Quantiles in ms of times that records hold in s: {"tpot_p50_ms": ...}; failed requests are out."""
    good = [record for record in records if "error" not in record]
    found = {}
    for key in keys:
        sample = np.array([1000 * r[f"{key}_s"] for r in good if r.get(f"{key}_s") is not None])
        for q in quantiles:
            found[f"{key}_p{100 * q:.0f}_ms"] = float(np.quantile(sample, q)) if len(sample) else float("nan")
    return found
