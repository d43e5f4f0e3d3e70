"""Automatic refits of a table: their reasons, and that workers keep their traffic."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from eldr_serve.experts.fitting.refit import refit_centroids, refit_gain, refit_reason
from tests.support.tables import unit_table


def traffic(*experts: int, each: int = 20, seed: int = 0) -> NDArray[np.uint32]:
    """Return counts of prompts of several kinds: each kind uses its own expert of layer 0, with noise."""
    rng = np.random.default_rng(seed)
    counts = rng.poisson(0.3, (each * len(experts), 2, 8)).astype(np.uint32)
    counts[np.arange(len(counts)), 0, np.tile(experts, each)] += 20
    return counts


@given(st.permutations(range(4)), st.integers(0, 5))
def test_unchanged_traffic_keeps_its_workers(order: list[int], seed: int) -> None:
    table = unit_table(4)
    fitted = refit_centroids(table, traffic(*order, seed=seed), 4, seed=seed)
    assert (fitted.centroids @ table.centroids.T).argmax(axis=1).tolist() == [0, 1, 2, 3]
    assert fitted.domains == table.domains


def test_new_centroids_follow_those_that_stay() -> None:
    table = unit_table(2)
    fitted = refit_centroids(table, traffic(5, 1, 0, 6), 4)
    served = fitted.centroids[:, :8].argmax(axis=1).tolist()
    assert served[:2] == [0, 1]
    assert set(served[2:]) == {5, 6}
    fewer = refit_centroids(unit_table(4), traffic(3, 1), 2)
    assert fewer.centroids[:, :8].argmax(axis=1).tolist() == [1, 3]


@pytest.mark.parametrize(
    ("now", "workers", "each", "why"),
    [
        ((0, 1, 2), 3, 20, None),
        ((5, 6, 7), 3, 20, "traffic has drifted"),
        ((0, 1, 2), 2, 20, "2 decode replicas serve, and the table is for 3"),
        ((5, 6, 7), 3, 4, None),  # too few prompts
    ],
)
def test_a_refit_has_a_reason(now: tuple[int, ...], workers: int, each: int, why: Any) -> None:
    reason = refit_reason(unit_table(3), traffic(*now, each=each), workers, min_gain=0.02)
    assert reason is None if why is None else reason.startswith(why)


def test_the_gain_is_measured_on_signatures_outside_the_fit() -> None:
    assert refit_gain(unit_table(3), traffic(0, 1, 2)) < 0.02
    assert refit_gain(unit_table(3), traffic(5, 6, 7)) > 0.5
