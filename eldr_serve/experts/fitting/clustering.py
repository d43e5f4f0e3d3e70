"""Balanced K-means over signatures (ELDR, section 4.3.1): clusters of equal size, one per decode worker."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import logsumexp
from sklearn.cluster import KMeans, kmeans_plusplus

from eldr_serve.errors import UserInputError

STARTS = 8  # starts of balanced K-means, of which the best is kept


@dataclass(frozen=True)
class Clusters:
    """Centroids of unit norm, float32[k,D], and the cluster of each point, int64[N]."""

    centroids: NDArray[np.float32]
    labels: NDArray[np.int64]

    @property
    def sizes(self) -> NDArray[np.int64]:
        """Return the number of points in each cluster, int64[k]."""
        return np.bincount(self.labels, minlength=len(self.centroids))

    def distance(self, points: NDArray[np.floating]) -> float:
        """Return the mean cosine distance of the points, float[N,D], to their centroids."""
        return 1 - float(np.einsum("nd,nd->n", points, self.centroids[self.labels]).mean())


def balanced_kmeans(
    points: ArrayLike, k: int, *, seed: int = 0, starts: int = STARTS, iterations: int = 20
) -> Clusters:
    """Run K-means with cosine distance and at most ceil(N/k) points per cluster.

    Each start begins with other centroids and repeats rounds until no point changes its cluster. A round
    assigns the points so that their total distance is the least under this bound (exactly, see
    `balanced_assignment`), and then moves each centroid to the direction of its cluster's mean. The start
    with the least distance is kept.

    Args:
        points: float[N,D], rows of unit norm, or of zeros, which are equally far from all centroids.
        seed: seed of all starts; a run with more starts repeats the starts of a run with fewer.
        starts: number of starts, 1 or more.
        iterations: maximum number of rounds of a start.

    Raises:
        UserInputError: points are not a finite [N, D] array, k is not in 1..N, or there is no start.
    """
    if starts < 1:
        raise UserInputError(f"starts must be 1 or more, got {starts}")
    x = _check_points(points, k)
    rng = np.random.RandomState(seed)  # the generator that scikit-learn takes
    candidates = [
        _run_start(x, kmeans_plusplus(x, k, random_state=rng)[0], iterations) for _ in range(starts)
    ]
    return min(candidates, key=lambda clusters: clusters.distance(x))


def _run_start(x: NDArray[np.float32], first: NDArray[np.float32], iterations: int) -> Clusters:
    """Run rounds of assignments and means from the first centroids, float32[k,D]."""
    k = len(first)
    capacity = -(-len(x) // k)
    centroids = _unit(first)
    labels = np.full(len(x), -1)
    prices = np.zeros(k)
    for _ in range(iterations):
        previous = labels
        labels, prices = balanced_assignment(1 - x @ centroids.T, capacity, prices)
        if (labels == previous).all():
            break
        centroids = _means(x, labels, centroids)
    return Clusters(centroids, labels)


def kmeans(points: ArrayLike, k: int, *, seed: int = 0) -> Clusters:
    """Run K-means without the bound, the baseline of the balanced variant."""
    x = _check_points(points, k)
    model = KMeans(k, n_init=4, random_state=seed).fit(x)
    return Clusters(_unit(model.cluster_centers_.astype(np.float32)), model.labels_.astype(np.int64))


def balanced_assignment(
    cost: ArrayLike, capacity: int, prices: NDArray[np.float64] | None = None
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Assign N points to K clusters with the least total cost and at most `capacity` points in each.

    The result is exact. Unlike the Hungarian algorithm on N x N cells, this works on the K clusters: every
    point starts in the cluster with the least cost + price, and points move from overfull clusters along
    shortest paths to clusters with room. This keeps the reduced costs non-negative, as in successive
    shortest paths from a pseudoflow. Good initial prices only save moves.

    Args:
        cost: float[N,K], finite.
        capacity: maximum points per cluster; N <= K * capacity.
        prices: float64[K], initial prices, as returned for a similar problem.

    Returns:
        labels int64[N] and the clusters' prices float64[K], which certify that the labels are optimal.

    Raises:
        UserInputError: the points do not fit.
    """
    costs = np.asarray(cost, np.float64)
    num_points, k = costs.shape
    if num_points > k * capacity:
        raise UserInputError(f"{num_points} points do not fit into {k} clusters of {capacity}")
    # Dummy points without cost fill the clusters, so that all end exactly full.
    costs = np.vstack([costs, np.zeros((k * capacity - num_points, k))])
    price = _soft_prices(costs, capacity, np.zeros(k) if prices is None else prices.copy())
    labels = np.argmin(costs + price, axis=1)
    sizes = np.bincount(labels, minlength=k)
    move_costs = np.full((k, k), np.inf)  # least extra cost of moving a point from a to b
    cheapest_points = np.zeros((k, k), np.int64)
    for cluster in range(k):
        _refresh_move_costs(cluster, costs, labels, move_costs, cheapest_points)
    while (sizes > capacity).any():
        path = _shortest_path(move_costs, price, sizes, capacity)
        for a, b in itertools.pairwise(path):
            labels[cheapest_points[a, b]] = b
        sizes[path[0]] -= 1
        sizes[path[-1]] += 1
        for cluster in path:
            _refresh_move_costs(cluster, costs, labels, move_costs, cheapest_points)
    return labels[:num_points], price


def _shortest_path(
    move_costs: NDArray[np.float64], price: NDArray[np.float64], sizes: NDArray[np.int64], capacity: int
) -> list[int]:
    """Return the shortest path from an overfull cluster to one with room (Dijkstra); updates `price`."""
    k = len(sizes)
    distance = np.where(sizes > capacity, 0.0, np.inf)
    parent = np.full(k, -1)
    open_distance = distance.copy()
    while True:
        a = int(np.argmin(open_distance))
        reached = open_distance[a]
        if sizes[a] < capacity:
            break
        open_distance[a] = np.inf
        through = reached + np.maximum(move_costs[a] + price - price[a], 0.0)
        better = through < distance
        distance[better] = through[better]
        open_distance[better] = through[better]
        parent[better] = a
    price += reached - np.minimum(distance, reached)
    path = [a]
    while parent[path[-1]] >= 0:
        path.append(int(parent[path[-1]]))
    return path[::-1]


def _refresh_move_costs(
    cluster: int,
    costs: NDArray[np.float64],
    labels: NDArray[np.int64],
    move_costs: NDArray[np.float64],
    cheapest_points: NDArray[np.int64],
) -> None:
    """Update the least extra cost of moving a point from the cluster, and the point, in place."""
    members = np.flatnonzero(labels == cluster)
    if not len(members):
        move_costs[cluster] = np.inf
        return
    extra = costs[members] - costs[members, cluster, None]
    cheapest = np.argmin(extra, axis=0)
    move_costs[cluster] = extra[cheapest, np.arange(len(move_costs))]
    cheapest_points[cluster] = members[cheapest]


def _soft_prices(
    costs: NDArray[np.float64], capacity: int, price: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Return prices at which about `capacity` points choose each cluster, by annealed entropic transport."""
    scale = float(np.std(costs)) or 1.0
    for temperature in scale * np.geomspace(0.3, 0.01, 8):
        for _ in range(2):
            logits = -(costs + price) / temperature
            share = logsumexp(logits - logsumexp(logits, axis=1, keepdims=True), axis=0)
            price += temperature * (share - np.log(capacity))
    return price


def _check_points(points: ArrayLike, k: int) -> NDArray[np.float32]:
    x = np.asarray(points, np.float32)
    if x.ndim != 2 or not np.isfinite(x).all():
        raise UserInputError(f"points must be a finite array [N, D], got shape {x.shape}")
    if not 1 <= k <= len(x):
        raise UserInputError(f"cannot make {k} clusters of {len(x)} points")
    return x


def _means(
    x: NDArray[np.float32], labels: NDArray[np.int64], old: NDArray[np.float32]
) -> NDArray[np.float32]:
    sums = np.zeros_like(old)
    order = np.argsort(labels, kind="stable")
    filled, starts = np.unique(labels[order], return_index=True)
    sums[filled] = np.add.reduceat(x[order], starts, axis=0)
    # A cluster without points, or whose points cancel out, keeps its direction.
    undefined = np.linalg.norm(sums, axis=1) < 1e-12
    sums[undefined] = old[undefined]
    return _unit(sums)


def _unit(rows: NDArray[np.float32]) -> NDArray[np.float32]:
    norm = np.linalg.norm(rows, axis=1, keepdims=True)
    if not norm.all():
        rows = np.where(norm > 0, rows, 1.0)  # a zero row has no direction, so any will do
        norm = np.linalg.norm(rows, axis=1, keepdims=True)
    unit: NDArray[np.float32] = (rows / norm).astype(np.float32)
    return unit
