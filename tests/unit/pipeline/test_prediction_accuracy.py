"""The error of predictions, and the margin that follows from it."""

import random

import pytest

from eldr_serve.pipeline.admission.prediction_accuracy import WINDOW_S, ConcurrencyMeter, PredictionAccuracy
from tests.support.clock import Clock


def test_sums_and_the_share_that_met_the_objective() -> None:
    accuracy = PredictionAccuracy(Clock())
    accuracy.record(1.0, 1.5, 1.2, load=1.0)
    accuracy.record(2.0, 1.8, 1.8, load=1.0)
    status = accuracy.status()
    assert status == {
        "requests": 2,
        "met": 1,
        "predicted_s": 3.0,
        "measured_s": 3.3,
        "error_s": 0.7,
        "margin_s": 0.0,
    }


@pytest.mark.parametrize("bias", [-1.0, 0.0, 0.5])
def test_prediction_and_margin_cover_97_percent(bias: float) -> None:
    rng, accuracy = random.Random(0), PredictionAccuracy(Clock())
    covered = 0
    for number in range(2000):
        measured = 3.0 + bias + rng.gauss(0, 0.2)
        covered += number >= 200 and measured <= 3.0 + accuracy.compute_margin_s(1.0)
        accuracy.record(3.0, measured, 3.0, load=1.0)
    assert 0.96 < covered / 1800 < 0.99


def test_old_errors_and_few_errors_do_not_count() -> None:
    accuracy = PredictionAccuracy(clock := Clock())
    for _ in range(7):
        accuracy.record(1.0, 9.0, 1.0, load=1.0)
    assert accuracy.compute_margin_s(1.0) == 0.0
    accuracy.record(1.0, 9.0, 1.0, load=1.0)
    assert accuracy.compute_margin_s(1.0) == 8.0
    clock.now = WINDOW_S + 1
    assert accuracy.compute_margin_s(1.0) == 8.0  # there are no newer ones
    for _ in range(8):
        accuracy.record(1.0, 2.0, 1.0, load=1.0)
    assert accuracy.compute_margin_s(1.0) == 1.0
    assert accuracy.num_measured == 16


def test_errors_at_a_high_load_do_not_refuse_requests_at_a_low_one() -> None:
    accuracy = PredictionAccuracy(Clock())
    for _ in range(100):
        accuracy.record(1.0, 1.1, 1.0, load=1.0)
        accuracy.record(1.0, 5.0, 1.0, load=4.0)
    assert accuracy.compute_margin_s(1.2) == pytest.approx(0.1)
    assert accuracy.compute_margin_s(4.0) == pytest.approx(4.0)
    assert accuracy.compute_margin_s(3.0) == pytest.approx(3.0)


def test_the_newest_of_equally_near_errors_count() -> None:
    accuracy = PredictionAccuracy(Clock())
    for measured in (9.0, 2.0):
        for _ in range(100):
            accuracy.record(1.0, measured, 1.0, load=2.0)
    assert accuracy.compute_margin_s(2.0) == pytest.approx(1.0)


def test_after_a_burst_an_idle_service_admits_again() -> None:
    accuracy = PredictionAccuracy(Clock())
    for _ in range(50):
        accuracy.record(1.0, 13.0, 2.0, load=12.0)
    assert accuracy.compute_margin_s(12.0) == pytest.approx(12.0)
    assert accuracy.compute_margin_s(1.0) == pytest.approx(1.0)


def test_mean_concurrency_over_the_time_of_a_request() -> None:
    concurrency = ConcurrencyMeter(clock := Clock())
    first = concurrency.start()
    clock.now += 2.0
    second = concurrency.start()
    clock.now += 2.0
    assert concurrency.mean(first, 4.0) == pytest.approx(1.5)
    assert concurrency.mean(second, 2.0) == pytest.approx(2.0)
    concurrency.end()
    assert concurrency.running == 1
    assert concurrency.mean(concurrency.start(), 0.0) == 2.0
