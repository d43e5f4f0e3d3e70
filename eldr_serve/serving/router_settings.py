"""What a decode router is started with: the `router` of a deployment YAML."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import BaseModel, BeforeValidator, Field, model_validator

from eldr_serve.artifacts import RoutingTable
from eldr_serve.renamed import renamed
from eldr_serve.routing import DEFAULT_POLICY, make_policy


def _contents(table: Any) -> Any:
    """Of a RoutingTable file that can be read, its bytes; they travel to where the file is not."""
    if not isinstance(table, str | Path):
        return table
    RoutingTable.load(Path(table))
    return Path(table).read_bytes()


class RouterSettings(BaseModel, frozen=True, extra="forbid"):
    """Policy, table, and what happens to state that nobody renews."""

    _renamed = renamed(idle_exit_s=None)

    model_id: str = Field(default="", description="filled in: the model served; no other's table is taken")
    policy: str = Field(
        default=DEFAULT_POLICY,
        description="policy to start with, a name or my_package.module:MyPolicy; PUT /eldr/policy changes it",
    )
    parameters: dict[str, Any] = Field(
        default_factory=dict, description="parameters of the policy, as `band: 0.1` (cosine similarity)"
    )
    table: Annotated[bytes | None, BeforeValidator(_contents)] = Field(
        default=None,
        description="RoutingTable file to start with, seen from where the app is built; "
        "none: by load until one is swapped in",
    )
    client_timeout_s: float = Field(
        default=30.0, gt=0, description="leases of an ingress silent for longer are dropped, s"
    )
    seed: int = Field(default=0, description="seed of random choices")

    @model_validator(mode="after")
    def _can_be_made(self) -> Self:
        make_policy(self.policy, **self.parameters)
        return self
