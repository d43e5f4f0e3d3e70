"""Balanced K-means against the Hungarian algorithm."""

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scipy.optimize import linear_sum_assignment

from eldr_serve.experts.fitting.clustering import balanced_assignment, balanced_kmeans, kmeans


def hungarian(cost: np.ndarray, capacity: int) -> float:
    rows, columns = linear_sum_assignment(np.repeat(cost, capacity, axis=1))
    return float(np.repeat(cost, capacity, axis=1)[rows, columns].sum())


def total(cost: np.ndarray, labels: np.ndarray) -> float:
    return float(cost[np.arange(len(cost)), labels].sum())


@given(
    st.integers(1, 60),
    st.integers(1, 9),
    st.integers(0, 2**16),
    st.integers(0, 2),
    st.booleans(),
    st.booleans(),
)
@example(900, 30, 0, 0, False, False)
@settings(max_examples=120)
def test_assignment_equals_the_hungarian_algorithm(
    n: int, k: int, seed: int, slack: int, ties: bool, priced: bool
) -> None:
    rng = np.random.default_rng(seed)
    cost = rng.integers(0, 4, (n, k)).astype(float) if ties else rng.normal(size=(n, k)) ** 3
    capacity = -(-n // k) + slack
    labels, prices = balanced_assignment(cost, capacity, rng.normal(size=k) if priced else None)
    assert np.bincount(labels, minlength=k).max() <= capacity
    assert total(cost, labels) == pytest.approx(hungarian(cost, capacity))
    # The prices prove it: no point would be cheaper elsewhere.
    paid = (cost + prices)[np.arange(n), labels]
    assert (paid <= (cost + prices).min(axis=1) + 1e-9).all()


def blobs(sizes: list[int], seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    centres = np.eye(len(sizes), 12)
    points = np.concatenate(
        [c + 0.05 * rng.normal(size=(n, 12)) for c, n in zip(centres, sizes, strict=True)]
    )
    return points / np.linalg.norm(points, axis=1, keepdims=True), np.repeat(np.arange(len(sizes)), sizes)


def test_equal_clusters_are_found_and_only_plain_kmeans_ignores_balance() -> None:
    points, truth = blobs([20, 20, 20, 20])
    clusters, again = (balanced_kmeans(points, 4, seed=4) for _ in range(2))
    assert sorted(clusters.sizes) == [20] * 4
    assert all(len(set(clusters.labels[truth == blob])) == 1 for blob in range(4))
    np.testing.assert_array_equal(clusters.labels, again.labels)
    np.testing.assert_array_equal(clusters.centroids, again.centroids)
    points, _ = blobs([60, 6, 6])
    assert kmeans(points, 3).sizes.max() == 60
    assert balanced_kmeans(points, 3).sizes.max() == 24


@given(st.integers(1, 40), st.integers(1, 8), st.integers(0, 1000))
@settings(max_examples=40)
def test_no_cluster_exceeds_its_share(n: int, k: int, seed: int) -> None:
    points = np.random.default_rng(seed).normal(size=(n, 5))
    points[:: max(2, seed % 7)] = 0  # signatures can be zero
    points /= np.maximum(np.linalg.norm(points, axis=1, keepdims=True), 1e-9)
    if k > n:
        with pytest.raises(ValueError):
            balanced_kmeans(points, k)
        return
    clusters = balanced_kmeans(points, k, seed=seed, starts=2)
    assert clusters.sizes.max() <= -(-n // k)
    assert clusters.sizes.sum() == n
    np.testing.assert_allclose(np.linalg.norm(clusters.centroids, axis=1), 1, atol=1e-4)


def test_more_starts_never_end_worse_and_equal_seeds_give_equal_clusters() -> None:
    points = np.random.default_rng(5).normal(size=(60, 6))
    points /= np.linalg.norm(points, axis=1, keepdims=True)
    better = 0
    for seed in range(8):
        one, three, nine = (balanced_kmeans(points, 5, seed=seed, starts=n) for n in (1, 3, 9))
        distances = [clusters.distance(points) for clusters in (one, three, nine)]
        assert distances == sorted(distances, reverse=True)
        better += distances[2] < distances[0]
        again = balanced_kmeans(points, 5, seed=seed, starts=9)
        np.testing.assert_array_equal(nine.labels, again.labels)
        np.testing.assert_array_equal(nine.centroids, again.centroids)
    assert better >= 4


def test_bad_points_are_refused() -> None:
    with pytest.raises(ValueError, match="7 points"):
        balanced_assignment(np.zeros((7, 2)), 3)
    for bad in (np.ones(4), np.array([[np.nan, 1.0]])):
        with pytest.raises(ValueError, match="finite"):
            balanced_kmeans(bad, 1)
    with pytest.raises(ValueError, match="starts must be 1 or more, got 0"):
        balanced_kmeans(np.eye(3), 1, starts=0)
