"""Fit of a routing table to a calibration trace, with a report."""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eldr_serve.errors import UserInputError
from eldr_serve.experts.calibration_trace import CalibrationTrace
from eldr_serve.experts.fitting.clustering import STARTS, Clusters, balanced_kmeans
from eldr_serve.experts.fitting.quality import inverse_document_frequency, select_layers, signature_quality
from eldr_serve.experts.routing_table import RoutingTable
from eldr_serve.experts.signature import DEFAULT_TRANSFORM, TRANSFORMS, Element, SignatureSpec
from eldr_serve.validation import unknown_name


def fit_signature(
    trace: CalibrationTrace, transform: str = DEFAULT_TRANSFORM, *, seed: int = 0
) -> SignatureSpec:
    """Fit the weights and the layer mask to a calibration trace.

    Args:
        transform: one of TRANSFORMS.

    Raises:
        UserInputError: the transform is unknown, or the trace is too small to correlate.
    """
    if transform not in TRANSFORMS:
        raise UserInputError(unknown_name("", transform, TRANSFORMS, "transform"))
    element, weights = signature_weights(trace, transform)
    selection = select_layers(
        trace.prefill_counts, trace.decode_probability, weights=weights, element=element, seed=seed
    )
    return SignatureSpec(weights, selection.best_layers, element)


def signature_weights(trace: CalibrationTrace, transform: str) -> tuple[Element, NDArray[np.float32]]:
    """Return the element of a transform of TRANSFORMS, and the weight of each cell, float32[L,E]."""
    element, added_to_idf = TRANSFORMS[transform]
    if added_to_idf is None:
        return element, np.ones(trace.prefill_counts.shape[1:], np.float32)
    return element, inverse_document_frequency(trace.prefill_counts) + np.float32(added_to_idf)


def fit_table(
    trace: CalibrationTrace,
    workers: int,
    *,
    transform: str = DEFAULT_TRANSFORM,
    band: float = 0.1,
    starts: int = STARTS,
    seed: int = 0,
) -> tuple[RoutingTable, dict[str, Any]]:
    """Fit one balanced cluster per decode worker, over signatures with the layer mask that maximises rho.

    Args:
        starts: starts of balanced K-means, of which the best is kept.

    Returns:
        The table, and a JSON-able report: rho (kept layers, all layers), layers, cluster sizes,
        clusters by domain, mean similarity to the own and to the next cluster, seconds.

    Raises:
        UserInputError: there are fewer requests than workers or no decode steps, or the transform is unknown.
    """
    if not trace.decode_steps.any():
        raise UserInputError("the trace holds no decode step, so signatures have nothing to predict")
    if workers > len(trace.ids):
        raise UserInputError(f"cannot make {workers} clusters of {len(trace.ids)} requests")
    started_at_s = time.perf_counter()
    spec = fit_signature(trace, transform, seed=seed)
    fitted_at_s = time.perf_counter()
    points = spec.encode(trace.prefill_counts)
    clusters = balanced_kmeans(points, workers, seed=seed, starts=starts)
    clustered_at_s = time.perf_counter()
    table = RoutingTable(
        model=trace.model,
        spec=spec,
        centroids=clusters.centroids,
        cluster_sizes=clusters.sizes,
        domains=_majority_domains(clusters, trace.domains),
        band=band,
        version=1,
        transform=transform,
        seed=seed,
        fingerprint=trace.fingerprint,
    )
    all_layers = SignatureSpec(spec.weights, np.arange(table.num_layers), spec.element)
    points_of_all = all_layers.encode(trace.prefill_counts)
    report = {
        "model": trace.model,
        "requests": len(trace.ids),
        "workers": workers,
        "transform": transform,
        "rho": signature_quality(points, trace.decode_probability, seed=seed),
        "rho_all_layers": signature_quality(points_of_all, trace.decode_probability, seed=seed),
        "layers": spec.layers.tolist(),
        "cluster_sizes": clusters.sizes.tolist(),
        "clusters_by_domain": _count_by_domain(clusters, trace.domains),
        **_separation(points, clusters),
        "signature_s": fitted_at_s - started_at_s,
        "clustering_s": clustered_at_s - fitted_at_s,
    }
    return table, report


def compare_transforms(trace: CalibrationTrace, *, seed: int = 0) -> dict[str, dict[str, Any]]:
    """Return rho of all layers, greedy order and rho after each layer, by transform (Fig. 7, 8)."""
    results = {}
    for name in TRANSFORMS:
        element, weights = signature_weights(trace, name)
        selection = select_layers(
            trace.prefill_counts, trace.decode_probability, weights=weights, element=element, seed=seed
        )
        results[name] = {
            "rho_all_layers": float(selection.rho[-1]),
            "rho_kept_layers": float(selection.rho.max()),
            "layers_kept": len(selection.best_layers),
            "order": selection.order.tolist(),
            "rho": selection.rho.tolist(),
        }
    return results


def _majority_domains(clusters: Clusters, domains: list[str]) -> list[str]:
    counts = [
        Counter(np.array(domains)[clusters.labels == c].tolist()) for c in range(len(clusters.centroids))
    ]
    return [count.most_common(1)[0][0] if count else "" for count in counts]


def _count_by_domain(clusters: Clusters, domains: list[str]) -> dict[str, list[int]]:
    names = np.array(domains)
    k = len(clusters.centroids)
    return {
        name: np.bincount(clusters.labels[names == name], minlength=k).tolist()
        for name in sorted(set(domains))
    }


def _separation(points: NDArray[np.float32], clusters: Clusters) -> dict[str, float]:
    similarity = points @ clusters.centroids.T
    own = np.take_along_axis(similarity, clusters.labels[:, None], axis=1)[:, 0]
    np.put_along_axis(similarity, clusters.labels[:, None], -np.inf, axis=1)
    next_best = similarity.max(axis=1) if len(clusters.centroids) > 1 else np.zeros_like(own)
    return {"similarity_own_cluster": float(own.mean()), "similarity_next_cluster": float(next_best.mean())}
