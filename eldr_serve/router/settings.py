"""Start settings of a decode router: the `router` of a deployment YAML."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import BaseModel, BeforeValidator, Field, model_validator
from pydantic_core import to_jsonable_python

from eldr_serve.experts.artifact import Artifact
from eldr_serve.experts.routing_table import RoutingTable
from eldr_serve.experts.signature_predictor import SignaturePredictor
from eldr_serve.router.expert_placements import check_placements, load_placements, parse_placements
from eldr_serve.router_protocol.messages import NamedPolicy
from eldr_serve.scheduling import StepCost, make_policy
from eldr_serve.scheduling.cost_file import FittedCost
from eldr_serve.scheduling.policies.registry import DEFAULT_POLICY
from eldr_serve.signatures.settings import PoolSettings

# A change of these fields does not override what an operator has changed.
_OF_OTHER_SECTIONS = ("pool", "queue_timeout_s")


def _file_reader(kind: type[Artifact]) -> BeforeValidator:
    """Return a validator that replaces a path by the file's bytes, for machines without the file."""

    def read(value: Any) -> Any:
        if not isinstance(value, str | Path):
            return value
        kind.load(Path(value))
        return Path(value).read_bytes()

    return BeforeValidator(read)


def _read_cost(value: Any) -> Any:
    if not isinstance(value, str | Path):
        return value
    try:
        return FittedCost.load(Path(value)).cost
    except OSError as error:
        raise ValueError(f"it cannot be read ({error.strerror})") from error


def _read_placements(value: Any) -> Any:
    """Replace a folder by the content of its placements, for machines without the folder."""
    if isinstance(value, str | Path):
        return load_placements(Path(value))
    if value is None or isinstance(value, tuple):
        return value or ()
    raise ValueError("must be a folder")


def _refuse_in_yaml(value: Any) -> Any:
    if value is None or isinstance(value, PoolSettings):
        return value
    raise ValueError("`pool` is set automatically: write `signatures` beside `router`")


class RouterSettings(BaseModel, frozen=True, extra="forbid"):
    """Policy, artifacts and ingress timeout of a decode router."""

    model_id: str = Field(default="", description="set automatically: id of the served model")
    adapters: tuple[str, ...] = Field(
        default=(), description="set automatically: its LoRA adapters, as engines load them"
    )
    adapter_slots: int = Field(
        default=1, ge=1, description="set automatically: number of adapters that an engine keeps"
    )
    queue_timeout_s: float = Field(
        default=10.0, gt=0, description="set automatically: `path.queue_timeout_s`"
    )
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
    table: Annotated[bytes | None, _file_reader(RoutingTable)] = Field(
        default=None,
        description="RoutingTable file to start with, read where the app is built; "
        "null: place by load until one is swapped in",
    )
    predictor: Annotated[bytes | None, _file_reader(SignaturePredictor)] = Field(
        default=None,
        description="SignaturePredictor file to start with, read where the app is built; "
        "null: nothing is predicted until one is swapped in",
    )
    cost: Annotated[StepCost | None, BeforeValidator(_read_cost)] = Field(
        default=None,
        description="step cost until the engines' own steps are measured: a file of `eldr cost`, read where "
        "the app is built, or its terms; null: the cost of a small model on a CPU",
    )
    expert_placements: Annotated[tuple[bytes, ...], BeforeValidator(_read_placements)] = Field(
        default=(),
        description="folder with an ExpertPlacement for each cluster of `table` (`eldr place --cluster-of`), "
        "read where the app is built; each decode engine gets its position's placement; without it, engines "
        "keep the placement of their configuration",
    )
    ingress_timeout_s: float = Field(
        default=6.0,
        gt=0,
        description="time for an ingress to connect again after its channel is lost, until its leases are "
        "dropped, s",
    )
    pool: Annotated[PoolSettings | None, BeforeValidator(_refuse_in_yaml)] = Field(
        default=None, description="set automatically from `signatures`; null: no table of live traffic"
    )
    seed: int = Field(default=0, description="seed of random choices")

    @property
    def patience_s(self) -> float:
        """Return the patience of the decode queue, s: half of the time after which it refuses a request."""
        return self.queue_timeout_s / 2

    @property
    def fingerprint(self) -> str:
        """Return a fingerprint of the settings; the fields of other sections do not change it."""
        digest = hashlib.sha256()
        for name, value in self:
            if name in _OF_OTHER_SECTIONS:
                continue
            if not isinstance(value, bytes):  # the order of keys has no meaning
                value = json.dumps(to_jsonable_python(value, fallback=repr), sort_keys=True).encode()
            digest.update(name.encode() + b"=" + value)
        return digest.hexdigest()

    @model_validator(mode="after")
    def _check_placements(self) -> Self:
        if self.expert_placements:
            if self.table is None:
                raise ValueError("expert_placements needs `table`, for whose clusters they are made")
            check_placements(parse_placements(self.expert_placements), RoutingTable.from_bytes(self.table))
        return self

    @model_validator(mode="after")
    def _check_policies(self) -> Self:
        make_policy(self.policy, **self.parameters)
        if self.shadow is not None:
            make_policy(self.shadow.name, **self.shadow.parameters)
        return self
