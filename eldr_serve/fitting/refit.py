"""Keep the table fitted to the traffic and the decode replicas of now, until it is stopped.

    ray job submit --no-wait --working-dir . -- python -m offline.live_refit

It needs a table that is live, and no trace: the router keeps signatures of recent requests.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Annotated, Any

import numpy as np
import ray
import typer
from numpy.typing import NDArray
from ray.exceptions import RayError
from scipy.optimize import linear_sum_assignment

from eldr_serve.artifacts import RoutingTable
from eldr_serve.errors import SwapRefused, sentence
from eldr_serve.fitting.clustering import balanced_kmeans
from eldr_serve.serving.decode_router import actor_name, find
from tools.cli import run

_LEAST_A_WORKER = 8  # signatures, for a cluster to mean anything


def live_refit(
    every: Annotated[float, typer.Option(min=0.1, help="Time between two looks, s.")] = 60.0,
    min_gain: Annotated[
        float, typer.Option(help="Mean cosine that a refit must gain on signatures that it has not seen.")
    ] = 0.02,
    application: Annotated[str, typer.Option(help="`name` in the deployment's args.")] = "eldr",
    seed: Annotated[int, typer.Option(help="Seed of the clustering.")] = 0,
) -> None:
    """Refit and swap the table when traffic has drifted, or other decode replicas serve."""
    if not ray.is_initialized():
        ray.init(address="auto", log_to_driver=False, logging_level="warning")
    before: int | None = None
    while True:
        try:
            before = _look(find(actor_name(application)), before, min_gain, seed)
        except SwapRefused as error:
            typer.echo(f"the router keeps its table: {sentence(getattr(error, 'cause', None) or error)}")
        except (RayError, ValueError) as error:  # it is away, or comes again with another deployment
            typer.echo(f"the router of {application!r} does not answer: {sentence(error)}")
        time.sleep(every)


def _look(router: Any, before: int | None, min_gain: float, seed: int) -> int:
    """Refit if it is time to; returns how many decode replicas there are."""
    settings, status = ray.get([router.settings.remote(), router.status.remote()])
    workers = len(status["workers"])
    if settings.table is None or not workers:
        return workers
    recent = ray.get(router.recent_signatures.remote())
    found = refitted(settings.table, recent, workers, before, min_gain, seed=seed)
    if found is not None:
        fitted, why = found
        swapped = ray.get(router.swap_table.remote(fitted))
        typer.echo(f"{why}: table version {swapped.table_version} is live")
    return workers


def refitted(
    file: bytes,
    recent: list[NDArray[Any]],
    workers: int,
    before: int | None,
    min_gain: float,
    *,
    seed: int = 0,
) -> tuple[bytes, str] | None:
    """A RoutingTable file to swap in for the live one, and why; None while there is no reason.

    A router with the option `refit` runs this too (eldr_serve/serving/refit.py).

    Args:
        file: the live RoutingTable file's bytes.
        recent: unsigned[L,E] expert counts of prompts.
        workers, before: decode replicas now and at the last look.
    """
    table = RoutingTable.from_bytes(file)
    counts = np.array([c for c in recent if c.shape == table.spec.idf.shape])
    why = reason(table, counts, workers, before, min_gain, seed=seed)
    if why is None:
        return None
    return refit_centroids(table, counts, workers, seed=seed).to_bytes(), why


def reason(
    table: RoutingTable,
    counts: NDArray[Any],
    workers: int,
    before: int | None,
    min_gain: float,
    *,
    seed: int = 0,
) -> str | None:
    """Why the table should be fitted anew to these signatures, or None.

    Args:
        workers, before: decode replicas now and at the last look; while they change nothing is done.
    """
    if workers != before or len(counts) < _LEAST_A_WORKER * max(workers, len(table.centroids)):
        return None
    if len(table.centroids) != workers:
        return f"{workers} decode replicas serve, and the table is for {len(table.centroids)}"
    gained = gain(table, counts, seed=seed)
    return f"traffic has drifted, by a cosine of {gained:.3f}" if gained >= min_gain else None


def refit_centroids(
    table: RoutingTable, counts: NDArray[np.unsignedinteger[Any]], workers: int, *, seed: int = 0
) -> RoutingTable:
    """The same signature, clustered anew.

    A new centroid takes the slot of the old one that it is most like (all together), so that workers keep
    what they serve; those beyond the old ones come after them.

    Args:
        counts: unsigned[N,L,E], of prompts.

    Raises:
        ValueError: fewer signatures than workers, or of another shape than the table's.
    """
    points = table.spec.encode(counts)
    clusters = balanced_kmeans(points, workers, seed=seed)
    alike = clusters.centroids @ table.centroids.T
    order = np.full(workers, -1)
    new, old = linear_sum_assignment(alike, maximize=True)
    kept = new[np.argsort(old)]
    order[: len(kept)] = kept
    order[len(kept) :] = np.setdiff1d(np.arange(workers), kept)
    nearest = alike.argmax(axis=1)
    return replace(
        table,
        centroids=clusters.centroids[order],
        cluster_sizes=clusters.sizes[order],
        domains=[table.domains[nearest[cluster]] for cluster in order],
        version=table.version + 1,
        seed=seed,
        fingerprint="",
    )


def gain(table: RoutingTable, counts: NDArray[np.unsignedinteger[Any]], *, seed: int = 0) -> float:
    """By how much a refit would bring signatures nearer to their centroids, mean cosine.

    Fitted to every other signature, and judged on those between, which neither table was fitted to.
    """
    seen, unseen = counts[::2], counts[1::2]
    fitted = refit_centroids(table, seen, len(table.centroids), seed=seed)
    points = table.spec.encode(unseen)
    return _nearest(points, fitted) - _nearest(points, table)


def _nearest(points: NDArray[np.float32], table: RoutingTable) -> float:
    return float((points @ table.centroids.T).max(axis=1).mean())


if __name__ == "__main__":
    run(live_refit)
