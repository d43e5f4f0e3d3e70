"""Projection of signatures onto two fixed principal axes, for the live page."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eldr_serve.scheduling import CentroidTable, PlacementRequest

_MAX_CENTROIDS = 256  # centroids that define the axes; a larger eigenproblem would delay placements

Point = tuple[float, float]


class CentroidPlane:
    """The plane of the table's centroids; it needs only a signature's similarities to them.

    Its axes are the centroids' first two principal components, or the singular vectors of two centroids. An
    axis is a weighted sum of centroids, so a signature's coordinate is the same sum of its similarities.

    Args:
        version: version of the table; signatures scored with another table have no point.
    """

    def __init__(self, table: CentroidTable, version: int) -> None:
        self._version = version
        centroids = np.asarray(table.centroids[:_MAX_CENTROIDS], np.float64)
        gram = centroids @ centroids.T
        self._weights = _axes(gram)
        self.centroids: list[Point] = [_point(row @ self._weights) for row in gram]

    def point_of(self, request: PlacementRequest) -> Point | None:
        """Return the point of the request's signature; None if it was not scored with this table."""
        if request.similarity is None or request.table_version != self._version:
            return None
        return _point(request.similarity[:_MAX_CENTROIDS].astype(np.float64) @ self._weights)


class CountsPlane:
    """The plane of some requests' expert counts, as unit vectors.

    Args:
        counts: unsigned[L,E] each, none of them all zero.
    """

    centroids: tuple[Point, ...] = ()

    def __init__(self, counts: Sequence[NDArray[Any]]) -> None:
        rows = np.array([_unit(row) for row in counts])
        self._axes = rows.T @ _axes(rows @ rows.T)

    def point_of(self, request: PlacementRequest) -> Point | None:
        """Return the point of the request's counts; None if it has none of this shape."""
        counts = request.expert_counts
        if counts is None or counts.size != len(self._axes) or not counts.any():
            return None
        return _point(_unit(counts) @ self._axes)


def _axes(gram: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the weights of n rows in their two principal axes, float64[n, 2], from their inner products."""
    n = len(gram)
    if n > 2:
        centre = np.eye(n) - 1 / n
        gram = centre @ gram @ centre
    values, vectors = np.linalg.eigh(gram)
    strength = np.sqrt(np.maximum(values[::-1][:2], 0))
    weights = np.zeros((n, 2))
    for axis in range(min(n, 2)):
        if strength[axis] > 1e-6:
            weights[:, axis] = vectors[:, -1 - axis] / strength[axis]
    return weights


def _unit(counts: NDArray[Any]) -> NDArray[np.float64]:
    row = counts.reshape(-1).astype(np.float64)
    return row / np.linalg.norm(row)


def _point(pair: NDArray[np.float64]) -> Point:
    return round(float(pair[0]), 4), round(float(pair[1]), 4)
