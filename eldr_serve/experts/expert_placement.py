"""Placement of experts on EP ranks, and its file, which engines load.

The file has SGLang's format (`--init-expert-location`): JSON with the single key `physical_to_logical_map`.
All other data is in a sidecar, `NAME.meta.json` beside `NAME.json`.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray
from pydantic import BaseModel, ConfigDict, Field, model_validator

from eldr_serve.arrays import Ints
from eldr_serve.artifact_metadata import (
    ArtifactError,
    ArtifactMetadata,
    build_artifact,
    parse_metadata,
    read_file,
)
from eldr_serve.errors import UserInputError
from eldr_serve.files import write_all

_KEY = "physical_to_logical_map"


class _PlacementMetadata(ArtifactMetadata):
    schema_: Literal["eldr.expert-placement/1"] = Field(default="eldr.expert-placement/1", alias="schema")
    layers: int = Field(ge=1)
    slots: int = Field(ge=1)
    num_experts: int = Field(ge=1)
    ranks: int = Field(ge=1)
    nodes: int = Field(ge=1)
    method: str
    map_sha256: str
    report: dict[str, Any]
    expected_tokens: list[list[Annotated[float, Field(ge=0, allow_inf_nan=False)]]] | None = None


class Topology(BaseModel):
    """EP ranks (GPUs), the same number on each node; rank r is on node r // (ranks / nodes)."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    ranks: int = Field(ge=1, description="EP ranks")
    nodes: int = Field(default=1, ge=1, description="machines of the ranks")

    @model_validator(mode="after")
    def _check_nodes(self) -> Topology:
        if self.ranks % self.nodes:
            raise UserInputError(f"{self.ranks} ranks cannot be split evenly over {self.nodes} nodes")
        return self

    @property
    def node_of(self) -> Ints:
        """Return the node of each rank, int[G]."""
        return np.arange(self.ranks) // (self.ranks // self.nodes)


@dataclass(frozen=True, eq=False)
class ExpertPlacement:
    """The experts in the physical slots of an engine's ranks, for each layer.

    Attributes:
        physical_to_logical: int64[L, P], the logical expert in each slot; slots are rank-major.
        ranks: G, EP ranks (GPUs) with P / G slots each.
        nodes: machines with G / nodes ranks each.
        num_experts: E, logical experts per layer.
        model: id of the model.
        method: name of the algorithm that made the placement.
        fingerprint: fingerprint of the trace that the placement was made from.
        report: JSON-able report of the algorithm.
        expected_tokens: float[L, E], tokens of each expert that the placement was made for, in any unit.
            GRACE-MoE's rules choose replicas from them. None: unknown.

    Raises:
        UserInputError: an expert has no slot or is unknown, slots or ranks do not divide evenly, or the
            expected tokens have another shape.
    """

    physical_to_logical: Ints
    ranks: int
    num_experts: int
    model: str
    method: str
    nodes: int = 1
    fingerprint: str = ""
    report: dict[str, Any] = field(default_factory=dict)
    expected_tokens: NDArray[np.float64] | None = None

    def __post_init__(self) -> None:
        hosts_of(self.physical_to_logical, self.num_experts, self.ranks)
        if self.nodes < 1 or self.ranks % self.nodes:
            raise UserInputError(f"{self.ranks} ranks cannot be split evenly over {self.nodes} nodes")
        shape = (len(self.physical_to_logical), self.num_experts)
        if self.expected_tokens is not None and self.expected_tokens.shape != shape:
            raise UserInputError(f"expected_tokens have shape {self.expected_tokens.shape}, not {shape}")

    @property
    def hosts(self) -> NDArray[np.bool_]:
        """Return whether each rank holds a replica of each expert, bool[L, E, G]."""
        return hosts_of(self.physical_to_logical, self.num_experts, self.ranks)

    @property
    def num_redundant(self) -> int:
        """Return the slots per layer beyond one per expert, which engines call redundant experts."""
        return int(self.physical_to_logical.shape[1]) - self.num_experts

    @property
    def id(self) -> str:
        """Return the id of the placement, see placement_id."""
        return placement_id(self.physical_to_logical, self.ranks)

    def to_json(self) -> bytes:
        """Return the content of the canonical file."""
        return json.dumps({_KEY: self.physical_to_logical.tolist()}).encode() + b"\n"

    def to_vllm(self) -> bytes:
        """Return the JSON lines of vllm#41141 for `--eplb-config '{"initial_mapping_path": ...}'`."""
        layers, slots = self.physical_to_logical.shape
        record = {
            "record_type": "eplb_initial_mapping",
            "version": 1,
            "num_redundant_experts": self.num_redundant,
            "num_slots": slots,
            "initial_global_assignments": {
                str(layer): self.physical_to_logical[layer].tolist() for layer in range(layers)
            },
        }
        return json.dumps(record).encode() + b"\n"

    def files(self, path: Path) -> dict[Path, bytes]:
        """Return the content of the file and of its sidecar.

        Raises:
            UserInputError: SGLang would not recognise the name as a file.
        """
        content = self.to_json()
        layers, slots = self.physical_to_logical.shape
        metadata = _PlacementMetadata(
            model=self.model,
            fingerprint=self.fingerprint,
            layers=layers,
            slots=slots,
            num_experts=self.num_experts,
            ranks=self.ranks,
            nodes=self.nodes,
            method=self.method,
            map_sha256=hashlib.sha256(content).hexdigest(),
            report=self.report,
            expected_tokens=None if self.expected_tokens is None else self.expected_tokens.tolist(),
        )
        return {
            path: content,
            _sidecar_path(path): metadata.model_dump_json(by_alias=True, indent=1).encode() + b"\n",
        }

    def save(self, path: Path | str) -> None:
        """Write the file and its sidecar atomically."""
        write_all(self.files(Path(path)))

    @classmethod
    def load(cls, path: Path | str) -> Self:
        """Read a file and its sidecar; raise ArtifactError that names the first problem."""
        sidecar = _sidecar_path(Path(path))
        return cls.parse(read_file(path), read_file(sidecar), (str(path), str(sidecar)))

    @classmethod
    def parse(cls, content: bytes, sidecar: bytes | str, names: tuple[str, str]) -> Self:
        """Parse the contents of a file and its sidecar; errors contain the `names` of the two files."""
        name, sidecar_name = names
        metadata = parse_metadata(_PlacementMetadata, sidecar, sidecar_name)
        slots = build_artifact(name, lambda: _parse_map(content, metadata.layers, metadata.slots))
        if hashlib.sha256(content).hexdigest() != metadata.map_sha256:
            raise ArtifactError(f"{name} is not the placement that {Path(sidecar_name).name} describes")
        return build_artifact(
            name,
            lambda: cls(
                slots,
                metadata.ranks,
                metadata.num_experts,
                metadata.model,
                metadata.method,
                metadata.nodes,
                metadata.fingerprint,
                metadata.report,
                None if metadata.expected_tokens is None else _to_array(metadata.expected_tokens),
            ),
        )


def hosts_of(placement: ArrayLike, num_experts: int, ranks: int) -> NDArray[np.bool_]:
    """Return whether each rank holds a replica of each expert, bool[L, E, G].

    Raises:
        UserInputError: an expert has no slot or is unknown, or the ranks have unequal numbers of slots.
    """
    slots = np.asarray(placement)
    if slots.ndim != 2 or not slots.size or ranks < 1 or slots.shape[1] % ranks:
        raise UserInputError(f"a placement of shape {slots.shape} does not divide by {ranks} ranks")
    if not np.issubdtype(slots.dtype, np.integer):
        raise UserInputError(f"the placement holds {slots.dtype}, not the numbers of experts")
    if slots.min() < 0 or slots.max() >= num_experts:
        raise UserInputError(f"the placement names an expert outside 0 to {num_experts - 1}")
    hosts = np.zeros((len(slots), num_experts, ranks), bool)
    rank = np.arange(slots.shape[1]) // (slots.shape[1] // ranks)
    hosts[np.arange(len(slots))[:, None], slots, rank[None, :]] = True
    missing = np.argwhere(~hosts.any(axis=2))
    if len(missing):
        raise UserInputError(f"expert {missing[0][1]} of layer {missing[0][0]} has no slot")
    return hosts


def placement_id(placement: ArrayLike, ranks: int) -> str:
    """Return 12 hex digits that identify a placement, regardless of the order of slots within a rank.

    Args:
        placement: int[L, P], rank-major; -1: an empty slot, which is ignored.
    """
    rows = np.asarray(placement)
    by_rank = [
        [sorted(expert for expert in rank if expert >= 0) for rank in row]
        for row in rows.reshape(len(rows), ranks, -1).tolist()
    ]
    return hashlib.sha256(json.dumps(by_rank).encode()).hexdigest()[:12]


def check_placement_fits(
    placement: ArrayLike, *, layers: int, slots: int, num_experts: int, ranks: int
) -> None:
    """Raise UserInputError if an engine cannot hold this placement.

    Args:
        placement: int[L, P].
        layers, slots, num_experts, ranks: L, P, E and G of the engine.
    """
    shape = np.shape(placement)
    if shape != (layers, slots):
        raise UserInputError(
            f"the placement has {shape[0]} layers of {shape[1] if len(shape) > 1 else 0} slots, "
            f"but the model has {layers} of {slots}"
        )
    hosts_of(placement, num_experts, ranks)


def _to_array(rows: list[list[float]]) -> NDArray[np.float64]:
    """Return rows of equal length as an array."""
    if len({len(row) for row in rows}) > 1:
        raise UserInputError("expected_tokens have layers of different lengths")
    return np.array(rows, np.float64)


def _sidecar_path(path: Path) -> Path:
    if path.suffix != ".json":
        raise UserInputError(f"{path.name} must end in .json: SGLang recognises placement files by it")
    return path.with_suffix(".meta.json")


def _parse_map(content: bytes, layers: int, slots: int) -> Ints:
    """Parse the canonical file to int64[layers, slots]."""
    try:
        parsed = json.loads(content)
    except ValueError as error:
        raise UserInputError(f"not JSON ({error})") from error
    if not isinstance(parsed, dict) or list(parsed) != [_KEY]:
        raise UserInputError(f"not a placement: it must have the single key {_KEY}")
    rows = parsed[_KEY]
    if not isinstance(rows, list) or len(rows) != layers:
        raise UserInputError(f"the placement does not have {layers} layers")
    for layer, row in enumerate(rows):
        if not isinstance(row, list) or any(type(expert) is not int for expert in row):
            raise UserInputError(f"layer {layer} is not a list of experts")
        if len(row) != slots:
            raise UserInputError(f"layer {layer} has {len(row)} slots, not {slots}")
    return np.array(rows, np.int64)
