"""Start settings of a decode router: the `router` of a deployment YAML."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import BaseModel, BeforeValidator, Field, model_validator

from eldr_serve.experts.routing_table import Artifact, RoutingTable
from eldr_serve.experts.signature_predictor import SignaturePredictor
from eldr_serve.router.messages import NamedPolicy
from eldr_serve.scheduling import DEFAULT_POLICY, make_policy
from eldr_serve.signatures.settings import PoolSettings


def _contents_of(kind: type[Artifact]) -> BeforeValidator:
    """Return a validator that replaces a path by the file's bytes, for machines without the file."""

    def contents(given: Any) -> Any:
        if not isinstance(given, str | Path):
            return given
        kind.load(Path(given))
        return Path(given).read_bytes()

    return BeforeValidator(contents)


def _not_from_yaml(given: Any) -> Any:
    if given is None or isinstance(given, PoolSettings):
        return given
    raise ValueError("`pool` is set automatically: write `signatures` beside `router`")


class RouterSettings(BaseModel, frozen=True, extra="forbid"):
    """Policy, artifacts and client timeout of a decode router."""

    model_id: str = Field(default="", description="set automatically: id of the served model")
    policy: str = Field(
        default=DEFAULT_POLICY,
        description="policy to start with, a name or my_package.module:MyPolicy; PUT /eldr/policy changes it",
    )
    parameters: dict[str, Any] = Field(
        default_factory=dict, description="parameters of the policy, such as `band: 0.1` (cosine similarity)"
    )
    shadow: NamedPolicy | None = Field(
        default=None,
        description="policy to compare the live one with, `{name, parameters}`; PUT /eldr/shadow changes it",
    )
    table: Annotated[bytes | None, _contents_of(RoutingTable)] = Field(
        default=None,
        description="RoutingTable file to start with, read where the app is built; "
        "none: place by load until one is swapped in",
    )
    predictor: Annotated[bytes | None, _contents_of(SignaturePredictor)] = Field(
        default=None,
        description="SignaturePredictor file to start with, read where the app is built; "
        "none: nothing is predicted until one is swapped in",
    )
    client_timeout_s: float = Field(
        default=6.0,
        gt=0,
        description="time for an ingress to connect again after its channel is lost, until its leases are "
        "dropped, s",
    )
    pool: Annotated[PoolSettings | None, BeforeValidator(_not_from_yaml)] = Field(
        default=None, description="set automatically from `signatures`; none: no table of live traffic"
    )
    seed: int = Field(default=0, description="seed of random choices")

    @property
    def fingerprint(self) -> str:
        """Return a fingerprint that is equal for equal settings; the pool's settings are not part of it."""
        found = hashlib.sha256()
        for name, value in self:
            if name == "pool":
                continue
            found.update(name.encode() + b"=" + (value if isinstance(value, bytes) else repr(value).encode()))
        return found.hexdigest()

    @model_validator(mode="after")
    def _can_be_made(self) -> Self:
        make_policy(self.policy, **self.parameters)
        if self.shadow is not None:
            make_policy(self.shadow.name, **self.shadow.parameters)
        return self
