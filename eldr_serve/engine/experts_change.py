"""Changes of the expert placement of a replica, as bodies of calls and answers of the router."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from eldr_serve.artifact_metadata import ArtifactError
from eldr_serve.errors import BadRequestError, one_line_message
from eldr_serve.experts.expert_placement import ExpertPlacement


class ExpertsChange(BaseModel):
    """The body of PUT /eldr/experts, and of the call that passes it to each decode replica."""

    model_config = ConfigDict(extra="forbid")

    map: dict[str, Any] = Field(description="content of the placement's .json")
    meta: dict[str, Any] = Field(description="content of its .meta.json")
    load: list[list[float]] | None = Field(
        default=None,
        description="expected tokens per expert, [layers][experts], for replica choices that need them; "
        "null: the placement's own",
    )
    replicas: list[str] | None = Field(default=None, min_length=1, description="decode replicas; null: all")

    @classmethod
    def parse(cls, body: bytes) -> tuple[ExpertsChange, ExpertPlacement]:
        """Return the body and its placement; raise BadRequestError if they are invalid."""
        try:
            change = cls.model_validate_json(body)
            placement = ExpertPlacement.parse(
                json.dumps(change.map).encode() + b"\n", json.dumps(change.meta), ("map", "meta")
            )
        except (ValidationError, ArtifactError) as error:
            raise BadRequestError(one_line_message(error)) from error
        return change, placement

    @staticmethod
    def encode(placement: ExpertPlacement) -> bytes:
        """Return the body that applies a placement, with its expected tokens, to all decode replicas."""
        content, sidecar = placement.files(Path("placement.json")).values()
        return json.dumps({"map": json.loads(content), "meta": json.loads(sidecar)}).encode()


class ExpertPlacementOfPosition(NamedTuple):
    """The expert placement of a decode worker's position.

    Attributes:
        position: the position.
        digest: identifies the body.
        body: the body of a call of PLACE_EXPERTS; None if the caller already has the body with this digest.
    """

    position: int
    digest: str
    body: bytes | None
