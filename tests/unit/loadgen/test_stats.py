"""Bootstrap intervals, and requests within their objectives."""

import math
from functools import partial

import numpy as np
import pytest
from scipy import stats

from loadgen.statistics import (
    DRAWS,
    LatencyObjective,
    Sample,
    interval,
    median_ci,
    paired_change_percent,
    paired_ratio_percent,
    relative_percent,
    resampled_counts,
)

VALUES = np.random.default_rng(5).lognormal(3, 0.6, 300)


@pytest.mark.parametrize("q", [50, 90, 99])
def test_a_paired_change_resamples_both_sides_together(q: int) -> None:
    base = VALUES * np.random.default_rng(6).normal(1.1, 0.01, len(VALUES))
    indices = np.random.default_rng(7).integers(len(VALUES), size=(DRAWS, len(VALUES)))
    ratios = np.percentile(VALUES[indices], q, axis=1) / np.percentile(base[indices], q, axis=1)
    change = paired_change_percent(VALUES, base, partial(np.percentile, q=q), seed=7)
    assert change[1:] == pytest.approx(100 * (np.percentile(ratios, [2.5, 97.5]) - 1))
    assert change.value == pytest.approx(100 * (np.percentile(VALUES, q) / np.percentile(base, q) - 1))


def test_a_resample_by_counts_equals_a_direct_resample() -> None:
    for units in (np.arange(300), np.repeat(np.arange(60), 5)):  # a unit is drawn with all its values
        counts = resampled_counts(np.zeros(units[-1] + 1, int), draws=50)
        quantiles = Sample(VALUES, units).resample(counts, [0.25, 0.5, 0.99])
        expected = [np.quantile(np.repeat(VALUES, drawn[units]), [0.25, 0.5, 0.99]) for drawn in counts]
        np.testing.assert_allclose(quantiles, expected)
    assert all(np.isnan(v) for v in median_ci([]))
    assert median_ci([3.0]) == (3.0, 3.0, 3.0)


def test_rounds_are_resampled_only_if_there_are_many() -> None:
    few, many = np.repeat(np.arange(3), 20), np.repeat(np.arange(5), 20)
    assert (resampled_counts(few, draws=50).reshape(50, 3, 20).sum(axis=2) == 20).all()
    counts = resampled_counts(many, draws=50).reshape(50, 5, 20)
    assert (counts == counts[:, :, :1]).all()  # whole rounds are drawn
    assert (counts[:, :, 0].sum(axis=1) == 5).all()


def test_a_cluster_bootstrap_includes_variation_between_rounds() -> None:
    rng = np.random.default_rng(6)
    rounds = np.repeat(np.arange(6), 100)
    values = rng.normal(rounds * 10.0, 1)
    sample = Sample(values, np.arange(600))
    widths = []
    for whole in (True, False):
        counts = resampled_counts(rounds, draws=500, whole_rounds=whole)
        _, low, high = interval(sample.quantile(0.5), sample.resample(counts, [0.5])[:, 0])
        widths.append(high - low)
    assert widths[0] > 10 * widths[1]


def test_pairing_removes_common_variation() -> None:
    rng = np.random.default_rng(6)
    common = rng.lognormal(3, 1, 400)
    base, faster = (Sample(common * factor * rng.normal(1, 0.01, 400), np.arange(400)) for factor in (1, 0.9))
    counts = resampled_counts(np.zeros(400, int))
    draws = [s.resample(counts, [0.5])[:, 0] for s in (base, faster)]
    change = relative_percent(faster.quantile(0.5), base.quantile(0.5), draws[1], draws[0])
    assert change.low < -10 < change.high
    assert change.high - change.low < 5
    alone = interval(base.quantile(0.5), draws[0])
    # Without pairing, the common variation would hide the change.
    assert 100 * (alone.high - alone.low) / alone.value > 4 * (change.high - change.low)


def test_goodput_needs_both_objectives() -> None:
    objective = LatencyObjective(ttft_ms=100, tpot_ms=20)
    assert objective.is_met_by({"ttft_s": 0.1, "tpot_s": 0.02})
    assert objective.is_met_by({"ttft_s": 0.1, "tpot_s": None})  # one token
    for ttft_s, tpot_s in ((0.11, 0.01), (0.05, 0.021), (None, None)):
        assert not objective.is_met_by({"ttft_s": ttft_s, "tpot_s": tpot_s})
    assert not objective.is_met_by({"ttft_s": 0.05, "tpot_s": 0.01, "error": "lost"})
    assert not objective.is_met_by({"error": "HTTP 503"})


@pytest.mark.parametrize("rounds", [2, 3, 6, 20])
def test_the_interval_of_a_paired_ratio_is_students_on_logarithms(rounds: int) -> None:
    rng = np.random.default_rng(rounds)
    base = rng.lognormal(3, 1, rounds)  # rounds differ far more than policies
    values = base * rng.normal(0.9, 0.02, rounds)
    logs = np.log(values / base)
    reference = stats.ttest_1samp(logs, 0.0).confidence_interval(0.95)
    expected = [100 * (math.exp(log) - 1) for log in (logs.mean(), reference.low, reference.high)]
    assert paired_ratio_percent(values, base) == pytest.approx(expected)
    # Either side may be the base.
    back = [100 * (1 / (1 + change / 100) - 1) for change in (expected[0], expected[2], expected[1])]
    assert paired_ratio_percent(base, values) == pytest.approx(back)


def test_a_paired_interval_has_its_nominal_coverage() -> None:
    rng = np.random.default_rng(3)
    covered = 0
    for _ in range(1000):
        base = rng.lognormal(3, 1, 6)
        change = paired_ratio_percent(base * 0.88 * rng.lognormal(0, 0.05, 6), base)
        covered += change.low < -12 < change.high
    assert 930 <= covered <= 970


def test_one_pair_has_no_interval_and_equal_pairs_have_one_of_zero_width() -> None:
    assert paired_ratio_percent([1.0], [2.0]) == pytest.approx((-50, math.nan, math.nan), nan_ok=True)
    assert all(math.isnan(value) for value in paired_ratio_percent([], []))
    assert paired_ratio_percent([1.0, 2.0, 4.0], [2.0, 4.0, 8.0]) == pytest.approx((-50, -50, -50))
