"""Waits are predicted from the rate of departures."""

import random
from statistics import mean

import pytest

from eldr_serve.queues.wait_estimate import WaitEstimator
from tests.support.clock import Clock


def test_the_predicted_wait_is_the_mean_interval_times_the_number_ahead() -> None:
    clock = Clock()
    estimate = WaitEstimator(clock=clock)
    for _ in range(3):
        clock.now += 2.0
        estimate.record_departure(empty=False)
    assert estimate.estimate_wait_s(5) == 0.0  # too few departures
    assert estimate.retry_after_s(5) == 1
    clock.now += 2.0
    estimate.record_departure(empty=False)
    assert estimate.estimate_wait_s(5) == pytest.approx(5 * 6.0 / 4)
    assert estimate.retry_after_s(5) == 8
    clock.now += 100.0  # a queue that does not move waits longer
    assert estimate.estimate_wait_s(5) > 100.0
    estimate.record_departure(empty=True)
    assert estimate.estimate_wait_s(5) == 0.0


def test_the_estimate_is_unbiased_between_random_departures() -> None:
    rng, clock = random.Random(0), Clock()
    waits_s: list[float] = []
    for _ in range(3000):
        estimate = WaitEstimator(clock=clock)
        for _ in range(32):
            clock.now += rng.expovariate(1.0)
            estimate.record_departure(empty=False)
        clock.now += rng.expovariate(1.0)
        waits_s.append(estimate.estimate_wait_s(1))
    assert mean(waits_s) == pytest.approx(1.0, rel=0.015)  # 32 or 31 intervals differ by 0.03
