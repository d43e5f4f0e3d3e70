"""Common parts of all artifact files: validated metadata and one-sentence errors."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from eldr_serve.errors import UserInputError, one_line_message

A = TypeVar("A")
M = TypeVar("M", bound="ArtifactMetadata")


class ArtifactError(UserInputError):
    """A file is invalid; the message is one sentence."""


class ArtifactMetadata(BaseModel):
    """Metadata of an artifact file, as JSON."""

    model_config = ConfigDict(extra="forbid")

    model: str
    package: str = Field(default_factory=lambda: _package_version())
    fingerprint: str = ""  # fingerprint of the data that the file was made from


def require(condition: bool, message: str) -> None:
    """Raise ArtifactError with this message unless the condition holds."""
    if not condition:
        raise ArtifactError(message)


def read_file(path: Path | str) -> bytes:
    """Return the file's content; raise ArtifactError if it cannot be read."""
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ArtifactError(f"{path} cannot be read: {error.strerror}") from error


def parse_metadata(schema: type[M], text: str | bytes, name: str) -> M:
    """Parse the metadata of the file `name`; raise ArtifactError that names the first invalid field."""
    try:
        return schema.model_validate_json(text)
    except ValidationError as error:
        raise ArtifactError(f"{name} has invalid metadata: {one_line_message(error)}") from error


def build_artifact(name: str, make: Callable[[], A]) -> A:
    """Return `make()`; convert its KeyError and ValueError to an ArtifactError with the file's name."""
    try:
        return make()
    except KeyError as error:
        raise ArtifactError(f"{name} lacks the array {error}") from error
    except ValueError as error:
        raise ArtifactError(f"{name}: {error}") from error


def _package_version() -> str:
    try:
        return version("eldr-serve")
    except PackageNotFoundError:
        return "unknown"
