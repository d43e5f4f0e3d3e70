"""Artifact files, which capture, fits and the router exchange: safetensors with JSON metadata inside.

Loading a file checks its schema and its shapes, and that its numbers are finite. Nothing is unpickled, so a
file cannot run code. An invalid file raises ArtifactError, which names the file.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load as load_tensors
from safetensors.numpy import save as save_tensors

from eldr_serve.artifact_metadata import ArtifactError, ArtifactMetadata, M, parse_metadata, read_file
from eldr_serve.files import write_atomically

_METADATA_KEY = "eldr"


class Artifact(ABC):
    """An object that is saved as one file."""

    @abstractmethod
    def to_bytes(self) -> bytes:
        """Return the file's content; equal artifacts give equal bytes."""

    @classmethod
    @abstractmethod
    def from_bytes(cls, data: bytes, *, name: str = "the file") -> Self:
        """Parse a file's content; raise ArtifactError, with the file's name, if it is invalid."""

    def save(self, path: Path | str) -> None:
        """Write the file atomically."""
        write_atomically(Path(path), self.to_bytes())

    @classmethod
    def load(cls, path: Path | str) -> Self:
        """Read a file; raise ArtifactError if it is missing or invalid."""
        return cls.from_bytes(read_file(path), name=str(path))


def pack_file(arrays: Mapping[str, NDArray[Any]], metadata: ArtifactMetadata) -> bytes:
    """Return the content of a safetensors file with these arrays and this metadata."""
    contiguous = {name: np.ascontiguousarray(array) for name, array in sorted(arrays.items())}
    data: bytes = save_tensors(contiguous, metadata={_METADATA_KEY: metadata.model_dump_json(by_alias=True)})
    return data


def unpack_file(data: bytes, schema: type[M], name: str) -> tuple[dict[str, NDArray[Any]], M]:
    """Return the arrays and the metadata of a file; raise ArtifactError, with its name, if it is invalid."""
    try:
        arrays = load_tensors(data)
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        text = header["__metadata__"][_METADATA_KEY]
    except (SafetensorError, KeyError) as error:
        raise ArtifactError(f"{name} is not an eldr-serve file, or is truncated: {error}") from error
    return arrays, parse_metadata(schema, text, name)
