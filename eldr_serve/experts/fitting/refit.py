"""Refits of a live table's centroids to recent traffic, and the decision when one is due."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment

from eldr_serve.experts.fitting import MIN_REQUESTS_PER_WORKER
from eldr_serve.experts.fitting.clustering import balanced_kmeans
from eldr_serve.experts.routing_table import RoutingTable
from eldr_serve.experts.signature import Counts


def refit_reason(table: RoutingTable, counts: Counts, workers: int, min_gain: float) -> str | None:
    """Return the reason to refit the table to these counts, or None.

    Args:
        counts: unsigned[N,L,E], counts of prompts.
        workers: number of decode replicas.
    """
    if len(counts) < MIN_REQUESTS_PER_WORKER * max(workers, len(table.centroids)):
        return None
    if len(table.centroids) != workers:
        return f"{workers} decode replicas serve, and the table is for {len(table.centroids)}"
    gain = refit_gain(table, counts)
    return f"traffic has drifted, by a cosine of {gain:.3f}" if gain >= min_gain else None


def refit_centroids(table: RoutingTable, counts: Counts, workers: int, *, seed: int = 0) -> RoutingTable:
    """Return the table with new centroids and the same signature.

    New centroids take the positions of old centroids so that the total similarity is the greatest. Each
    worker thus keeps the kind of requests that it serves. Additional centroids are appended.

    Args:
        counts: unsigned[N,L,E], counts of prompts.

    Raises:
        UserInputError: there are fewer requests than workers, or the counts do not have the table's shape.
    """
    clusters = balanced_kmeans(table.spec.encode(counts), workers, seed=seed)
    similarity = clusters.centroids @ table.centroids.T
    order = _matching_order(similarity)
    nearest = similarity.argmax(axis=1)
    return replace(
        table,
        centroids=clusters.centroids[order],
        cluster_sizes=clusters.sizes[order],
        domains=[table.domains[nearest[cluster]] for cluster in order],
        version=table.version + 1,
        seed=seed,
        fingerprint="",
    )


def keep_positions(fitted: RoutingTable, live: RoutingTable, counts: Counts) -> RoutingTable:
    """Return the fitted table, whose signature may differ, with its centroids in the live table's order.

    A new centroid takes the position of the live centroid that is nearest for the same requests.
    """
    new, old = ((t.spec.encode(counts) @ t.centroids.T).argmax(axis=1) for t in (fitted, live))
    shared = np.zeros((len(fitted.centroids), len(live.centroids)))
    np.add.at(shared, (new, old), 1)
    order = _matching_order(shared)
    return replace(
        fitted,
        centroids=fitted.centroids[order],
        cluster_sizes=fitted.cluster_sizes[order],
        domains=[fitted.domains[cluster] for cluster in order],
        version=live.version + 1,
    )


def split_halves(requests: int, seed: int = 0) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Split requests at random into half for fitting and half for evaluation; return ascending indices."""
    shuffled = np.random.default_rng(seed).permutation(requests)
    return np.sort(shuffled[: (requests + 1) // 2]), np.sort(shuffled[(requests + 1) // 2 :])


def refit_gain(table: RoutingTable, counts: Counts, *, seed: int = 0) -> float:
    """Return how much a refit would raise the mean cosine between a request and its nearest centroid.

    The new centroids are fitted to one half of the requests and compared with the table on the other half.
    """
    fitting, held_out = split_halves(len(counts), seed)
    fitted = refit_centroids(table, counts[fitting], len(table.centroids), seed=seed)
    points = table.spec.encode(counts[held_out])
    return _mean_nearest_cosine(points, fitted) - _mean_nearest_cosine(points, table)


def _matching_order(similarity: NDArray[np.floating]) -> NDArray[np.int64]:
    """Return the order of the new clusters that best matches the old ones; extra clusters come last.

    Args:
        similarity: float[new, old], similarities.
    """
    new, old = linear_sum_assignment(similarity, maximize=True)
    matched = new[np.argsort(old)]
    return np.concatenate([matched, np.setdiff1d(np.arange(len(similarity)), matched)])


def _mean_nearest_cosine(points: NDArray[np.float32], table: RoutingTable) -> float:
    return float((points @ table.centroids.T).max(axis=1).mean())
