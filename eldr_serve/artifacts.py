"""The files that pass between capture, fit and router: safetensors with a JSON record inside.

(`ExpertPlacement`, which engines read too, is JSON and has a module of its own.)

Loading checks the schema, every shape, and that numbers are finite; nothing is ever unpickled. What
does not fit raises ArtifactError, with one sentence that names the file.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field
from safetensors import SafetensorError
from safetensors.numpy import load as load_tensors
from safetensors.numpy import save as save_tensors

from eldr_serve.expert_placement import ExpertPlacement
from eldr_serve.files import write_whole
from eldr_serve.records import ArtifactError, R, Record, build, parse_record, read_file, require
from eldr_serve.signature import Element, SignatureSpec

__all__ = ["ArtifactError", "ExpertPlacement", "RoutingTable"]

_RECORD = "eldr"
_UNIT_TOLERANCE = 1e-3


class _TableRecord(Record):
    schema_: Literal["eldr.routing-table/1"] = Field(default="eldr.routing-table/1", alias="schema")
    element: Element
    transform: str
    band: float = Field(ge=0, le=2)
    version: int = Field(ge=0)
    seed: int
    domains: list[str]


class Artifact(ABC):
    """What is saved as one file."""

    @abstractmethod
    def to_bytes(self) -> bytes:
        """The file's content; equal artifacts give equal bytes."""

    @classmethod
    @abstractmethod
    def from_bytes(cls, data: bytes, *, name: str = "the file") -> Self:
        """Parse a file's content; ArtifactError, with the name, if it is not one."""

    def save(self, path: Path | str) -> None:
        """Write the file, whole or not at all."""
        write_whole(Path(path), self.to_bytes())

    @classmethod
    def load(cls, path: Path | str) -> Self:
        """Read a file; ArtifactError if it is missing or is not one."""
        return cls.from_bytes(read_file(path), name=str(path))


@dataclass(frozen=True, eq=False)
class RoutingTable(Artifact):
    """How to make a signature and where its clusters lie.

    Attributes:
        model: id of the model; a router of another model refuses the table.
        spec: how counts become a signature.
        centroids: float32[K, n*E], unit rows, one a decode worker.
        cluster_sizes: int64[K], calibration requests a cluster.
        band: width of the locality band, cosine similarity.
        version: counts the fits of one deployment; free for the user.
        domains: the most frequent calibration domain of each cluster, "" if unknown.
        transform: the name that the signature was fitted under.
        seed: of the clustering.
        fingerprint: of the trace that it was fitted on.
    """

    model: str
    spec: SignatureSpec
    centroids: NDArray[np.float32]
    cluster_sizes: NDArray[np.int64]
    domains: list[str]
    band: float = 0.1
    version: int = 0
    transform: str = "count-idf"
    seed: int = 0
    fingerprint: str = ""

    def __post_init__(self) -> None:
        shape = self.centroids.shape
        require(len(shape) == 2 and shape[0] > 0, f"centroids have shape {shape}, not [K, n*E]")
        require(shape[1] == self.spec.dim, f"centroids have {shape[1]} columns, signatures {self.spec.dim}")
        require(self.centroids.dtype == np.float32, "centroids are not float32")
        require(bool(np.isfinite(self.centroids).all()), "centroids are not finite")
        norms = np.linalg.norm(self.centroids, axis=1)
        require(bool((abs(norms - 1) < _UNIT_TOLERANCE).all()), "centroids are not of unit norm")
        require(self.cluster_sizes.shape == shape[:1], f"cluster sizes are not {shape[0]} numbers")
        require(len(self.domains) == shape[0], f"domains are not {shape[0]} names")
        require(0 <= self.band <= 2, f"band is {self.band}, it must be from 0 to 2")

    @property
    def num_layers(self) -> int:
        """L, MoE layers of the model."""
        return int(self.spec.idf.shape[0])

    @property
    def num_experts(self) -> int:
        """E, experts a layer."""
        return int(self.spec.idf.shape[1])

    def similarity(self, signature: NDArray[Any]) -> NDArray[np.float32]:
        """float32[K] cosine to each centroid, of counts[L,E] or of an encoded vector [n*E].

        Raises:
            ValueError: another shape.
        """
        if signature.ndim == 1:
            if signature.shape != (self.spec.dim,):
                raise ValueError(f"the signature has {signature.shape[0]} numbers, the table {self.spec.dim}")
            return self.centroids @ signature.astype(np.float32, copy=False)
        return self.centroids @ self.spec.encode(signature)

    def to_bytes(self) -> bytes:
        """The file's content; equal tables give equal bytes."""
        arrays: dict[str, NDArray[Any]] = {
            "idf": self.spec.idf,
            "layers": self.spec.layers,
            "centroids": self.centroids,
            "cluster_sizes": self.cluster_sizes,
        }
        record = _TableRecord(
            model=self.model,
            fingerprint=self.fingerprint,
            element=self.spec.element,
            transform=self.transform,
            band=self.band,
            version=self.version,
            seed=self.seed,
            domains=self.domains,
        )
        return pack_file(arrays, record)

    @classmethod
    def from_bytes(cls, data: bytes, *, name: str = "the table") -> Self:
        """Parse a file's content; ArtifactError if it is not one."""
        arrays, record = unpack_file(data, _TableRecord, name)
        return build(
            name,
            lambda: cls(
                model=record.model,
                spec=SignatureSpec(arrays["idf"], arrays["layers"], record.element),
                centroids=arrays["centroids"],
                cluster_sizes=arrays["cluster_sizes"],
                band=record.band,
                version=record.version,
                domains=record.domains,
                transform=record.transform,
                seed=record.seed,
                fingerprint=record.fingerprint,
            ),
        )


def pack_file(arrays: Mapping[str, NDArray[Any]], record: Record) -> bytes:
    """A safetensors file of the arrays, with the record inside."""
    contiguous = {name: np.ascontiguousarray(array) for name, array in sorted(arrays.items())}
    data: bytes = save_tensors(contiguous, metadata={_RECORD: record.model_dump_json(by_alias=True)})
    return data


def unpack_file(data: bytes, record: type[R], name: str) -> tuple[dict[str, NDArray[Any]], R]:
    """Its arrays and record; ArtifactError, with the name, for what is none."""
    try:
        arrays = load_tensors(data)
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        text = header["__metadata__"][_RECORD]
    except (SafetensorError, KeyError) as error:
        raise ArtifactError(f"{name} is not an eldr-serve file, or is cut: {error}") from error
    return arrays, parse_record(record, text, name)
