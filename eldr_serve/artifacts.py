"""The files that pass between capture, fit and router: safetensors with a JSON record inside.

(`ExpertPlacement`, which engines read too, is JSON and has a module of its own.)

Loading checks the schema, every shape, and that numbers are finite; nothing is ever unpickled. What
does not fit raises ArtifactError, with one sentence that names the file.
"""

from __future__ import annotations

import hashlib
import json
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

__all__ = ["ArtifactError", "CalibrationTrace", "ExpertPlacement", "RoutingTable"]

_RECORD = "eldr"
_UNIT_TOLERANCE = 1e-3


class _TraceRecord(Record):
    schema_: Literal["eldr.calibration-trace/1"] = Field(default="eldr.calibration-trace/1", alias="schema")
    top_k: int = Field(ge=1)
    domains: list[str]
    ids: list[str]


class _TableRecord(Record):
    schema_: Literal["eldr.routing-table/1"] = Field(default="eldr.routing-table/1", alias="schema")
    element: Element
    transform: str
    band: float = Field(ge=0, le=2)
    version: int = Field(ge=0)
    seed: int
    domains: list[str]


@dataclass(frozen=True, eq=False)
class CalibrationTrace:
    """Which experts N requests used.

    Attributes:
        model: id of the model.
        top_k: experts a token and layer.
        prefill_counts: uint32[N,L,E], prompt tokens that each expert got.
        decode_counts: uint32[N,L,E], the same over the decode steps.
        decode_steps: uint32[N]; may be 0.
        prompt_tokens: uint32[N].
        domains, ids: N names; a domain may be "".
        routes: uint8|uint16 [sum of steps, L, k], the experts of each decode step; or None.
        route_offsets: int64[N+1], where each request's routes begin; None with routes.
    """

    model: str
    top_k: int
    prefill_counts: NDArray[np.uint32]
    decode_counts: NDArray[np.uint32]
    decode_steps: NDArray[np.uint32]
    prompt_tokens: NDArray[np.uint32]
    domains: list[str]
    ids: list[str]
    routes: NDArray[np.unsignedinteger[Any]] | None = None
    route_offsets: NDArray[np.int64] | None = None

    def __post_init__(self) -> None:
        shape = self.prefill_counts.shape
        require(len(shape) == 3 and min(shape) > 0, f"prefill counts have shape {shape}, not [N, L, E]")
        require(self.decode_counts.shape == shape, f"decode counts have shape {self.decode_counts.shape}")
        for name in ("decode_steps", "prompt_tokens", "domains", "ids"):
            require(np.shape(getattr(self, name)) == shape[:1], f"{name} does not have {shape[0]} entries")
        for name in ("prefill_counts", "decode_counts", "decode_steps", "prompt_tokens"):
            require(getattr(self, name).dtype == np.uint32, f"{name} is not uint32")
        require(1 <= self.top_k <= shape[2], f"top_k is {self.top_k} of {shape[2]} experts")
        require(len(set(self.ids)) == len(self.ids), "two requests have the same id")
        for name, tokens in (("prefill_counts", self.prompt_tokens), ("decode_counts", self.decode_steps)):
            sums = getattr(self, name).sum(axis=2, dtype=np.int64)
            require(
                bool((sums == self.top_k * tokens.astype(np.int64)[:, None]).all()),
                f"{name} do not add up to top_k experts a token in every layer",
            )
        self._check_routes(shape)

    def _check_routes(self, shape: tuple[int, ...]) -> None:
        require((self.routes is None) == (self.route_offsets is None), "routes and offsets go together")
        if self.routes is None or self.route_offsets is None:
            return
        offsets = np.concatenate([[0], np.cumsum(self.decode_steps, dtype=np.int64)])
        require(
            np.array_equal(self.route_offsets, offsets), "route offsets are not those of the decode steps"
        )
        expected = (int(offsets[-1]), shape[1], self.top_k)
        require(self.routes.shape == expected, f"routes have shape {self.routes.shape}, not {expected}")
        require(not self.routes.size or int(self.routes.max()) < shape[2], "a route names an unknown expert")

    @property
    def decode_probability(self) -> NDArray[np.float32]:
        """float32[N,L,E]: share of a request's decode steps that chose the expert (paper, 4.2.1)."""
        steps = np.maximum(self.decode_steps, 1).astype(np.float32)
        return self.decode_counts.astype(np.float32) / steps[:, None, None]

    @property
    def fingerprint(self) -> str:
        """Names the content, for what is made from it."""
        return hashlib.sha256(self.to_bytes()).hexdigest()[:16]

    def decode_routes(self, requests: NDArray[np.int64]) -> NDArray[np.unsignedinteger[Any]]:
        """[steps, L, k], the experts of all decode steps of these requests.

        Raises:
            ValueError: the trace holds no routes, or these requests have no decode step.
        """
        if self.routes is None or self.route_offsets is None:
            raise ValueError("the trace holds no routes: capture it with offline.calibrate --routes")
        steps = [np.arange(*self.route_offsets[[r, r + 1]]) for r in requests]
        if not sum(map(len, steps)):
            raise ValueError("none of the requests has a decode step")
        routes: NDArray[np.unsignedinteger[Any]] = self.routes[np.concatenate(steps)]
        return routes

    def subset(self, index: NDArray[np.int64]) -> CalibrationTrace:
        """The requests at `index`, without routes."""
        return CalibrationTrace(
            self.model,
            self.top_k,
            self.prefill_counts[index],
            self.decode_counts[index],
            self.decode_steps[index],
            self.prompt_tokens[index],
            [self.domains[i] for i in index],
            [self.ids[i] for i in index],
        )

    def to_bytes(self) -> bytes:
        """The file's content; equal traces give equal bytes."""
        arrays: dict[str, NDArray[Any]] = {
            name: getattr(self, name)
            for name in ("prefill_counts", "decode_counts", "decode_steps", "prompt_tokens")
        }
        if self.routes is not None and self.route_offsets is not None:
            arrays |= {"routes": self.routes, "route_offsets": self.route_offsets}
        return _pack(
            arrays, _TraceRecord(model=self.model, top_k=self.top_k, domains=self.domains, ids=self.ids)
        )

    @classmethod
    def from_bytes(cls, data: bytes, *, name: str = "the trace") -> Self:
        """Parse a file's content; ArtifactError if it is not one."""
        arrays, record = _unpack(data, _TraceRecord, name)
        return build(
            name,
            lambda: cls(
                model=record.model,
                top_k=record.top_k,
                prefill_counts=arrays["prefill_counts"],
                decode_counts=arrays["decode_counts"],
                decode_steps=arrays["decode_steps"],
                prompt_tokens=arrays["prompt_tokens"],
                domains=record.domains,
                ids=record.ids,
                routes=arrays.get("routes"),
                route_offsets=arrays.get("route_offsets"),
            ),
        )

    def save(self, path: Path | str) -> None:
        """Write the file, whole or not at all."""
        write_whole(Path(path), self.to_bytes())

    @classmethod
    def load(cls, path: Path | str) -> Self:
        """Read a file; ArtifactError if it is missing or is not one."""
        return cls.from_bytes(read_file(path), name=str(path))


@dataclass(frozen=True, eq=False)
class RoutingTable:
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
        return _pack(arrays, record)

    @classmethod
    def from_bytes(cls, data: bytes, *, name: str = "the table") -> Self:
        """Parse a file's content; ArtifactError if it is not one."""
        arrays, record = _unpack(data, _TableRecord, name)
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

    def save(self, path: Path | str) -> None:
        """Write the file, whole or not at all."""
        write_whole(Path(path), self.to_bytes())

    @classmethod
    def load(cls, path: Path | str) -> Self:
        """Read a file; ArtifactError if it is missing or is not one."""
        return cls.from_bytes(read_file(path), name=str(path))


def _pack(arrays: Mapping[str, NDArray[Any]], record: Record) -> bytes:
    contiguous = {name: np.ascontiguousarray(array) for name, array in sorted(arrays.items())}
    data: bytes = save_tensors(contiguous, metadata={_RECORD: record.model_dump_json(by_alias=True)})
    return data


def _unpack(data: bytes, record: type[R], name: str) -> tuple[dict[str, NDArray[Any]], R]:
    try:
        arrays = load_tensors(data)
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        text = header["__metadata__"][_RECORD]
    except (SafetensorError, KeyError) as error:
        raise ArtifactError(f"{name} is not an eldr-serve file, or is cut: {error}") from error
    return arrays, parse_record(record, text, name)
