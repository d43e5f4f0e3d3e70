"""The routing table: the signature specification and the cluster centroids of a model, in one file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from eldr_serve.artifact_metadata import ArtifactMetadata, build_artifact, require
from eldr_serve.errors import UserInputError
from eldr_serve.experts.artifact import Artifact, pack_file, unpack_file
from eldr_serve.experts.signature import DEFAULT_TRANSFORM, Element, SignatureSpec

_UNIT_TOLERANCE = 1e-3


class _TableMetadata(ArtifactMetadata):
    schema_: Literal["eldr.routing-table/1"] = Field(default="eldr.routing-table/1", alias="schema")
    element: Element
    transform: str
    band: float = Field(ge=0, le=2)
    version: int = Field(ge=0)
    seed: int
    domains: list[str]


@dataclass(frozen=True, eq=False)
class RoutingTable(Artifact):
    """A signature specification and the cluster centroids of a model.

    Attributes:
        model: id of the model; a router of another model refuses the table.
        spec: conversion of counts to a signature.
        centroids: float32[K, n*E], rows of unit norm, one per decode worker.
        cluster_sizes: int64[K], calibration requests per cluster.
        band: width of the locality band, cosine similarity.
        version: number of the fit within a deployment; the user may choose it.
        domains: most frequent calibration domain of each cluster, "" if unknown.
        transform: name of the signature's transform.
        seed: seed of the clustering.
        fingerprint: fingerprint of the trace that the table was fitted on.
    """

    model: str
    spec: SignatureSpec
    centroids: NDArray[np.float32]
    cluster_sizes: NDArray[np.int64]
    domains: list[str]
    band: float = 0.1
    version: int = 0
    transform: str = DEFAULT_TRANSFORM
    seed: int = 0
    fingerprint: str = ""

    def __post_init__(self) -> None:
        shape = self.centroids.shape
        require(len(shape) == 2 and shape[0] > 0, f"centroids have shape {shape}, not [K, n*E]")
        require(shape[1] == self.spec.dim, f"centroids have {shape[1]} columns, not {self.spec.dim}")
        require(self.centroids.dtype == np.float32, "centroids are not float32")
        require(bool(np.isfinite(self.centroids).all()), "centroids are not finite")
        norms = np.linalg.norm(self.centroids, axis=1)
        require(bool((abs(norms - 1) < _UNIT_TOLERANCE).all()), "centroids are not of unit norm")
        require(self.cluster_sizes.shape == shape[:1], f"cluster sizes are not {shape[0]} numbers")
        require(len(self.domains) == shape[0], f"domains are not {shape[0]} names")
        require(0 <= self.band <= 2, f"band must be from 0 to 2, got {self.band}")

    @property
    def num_layers(self) -> int:
        """Return L, the number of MoE layers."""
        return int(self.spec.weights.shape[0])

    @property
    def num_experts(self) -> int:
        """Return E, the number of experts per layer."""
        return int(self.spec.weights.shape[1])

    def similarity(self, signature: NDArray[Any]) -> NDArray[np.float32]:
        """Return the cosine to each centroid, float32[K].

        Args:
            signature: counts[L,E] or an encoded vector [n*E].

        Raises:
            UserInputError: the signature has another shape.
        """
        if signature.ndim == 1:
            if signature.shape != (self.spec.dim,):
                raise UserInputError(
                    f"the signature has {signature.shape[0]} numbers, but the table has {self.spec.dim}"
                )
            return self.centroids @ signature.astype(np.float32, copy=False)
        return self.centroids @ self.spec.encode(signature)

    def to_bytes(self) -> bytes:
        """Return the file's content; equal tables give equal bytes."""
        arrays: dict[str, NDArray[Any]] = {
            "idf": self.spec.weights,
            "layers": self.spec.layers,
            "centroids": self.centroids,
            "cluster_sizes": self.cluster_sizes,
        }
        metadata = _TableMetadata(
            model=self.model,
            fingerprint=self.fingerprint,
            element=self.spec.element,
            transform=self.transform,
            band=self.band,
            version=self.version,
            seed=self.seed,
            domains=self.domains,
        )
        return pack_file(arrays, metadata)

    @classmethod
    def from_bytes(cls, data: bytes, *, name: str = "the table") -> Self:
        """Parse a file's content; raise ArtifactError if it is invalid."""
        arrays, metadata = unpack_file(data, _TableMetadata, name)
        return build_artifact(
            name,
            lambda: cls(
                model=metadata.model,
                spec=SignatureSpec(arrays["idf"], arrays["layers"], metadata.element),
                centroids=arrays["centroids"],
                cluster_sizes=arrays["cluster_sizes"],
                band=metadata.band,
                version=metadata.version,
                domains=metadata.domains,
                transform=metadata.transform,
                seed=metadata.seed,
                fingerprint=metadata.fingerprint,
            ),
        )
