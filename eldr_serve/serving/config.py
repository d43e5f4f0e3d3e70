"""What a deployment YAML says: two Ray Serve LLM configurations and how requests move between them."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, SecretStr, field_validator, model_validator

from eldr_serve.artifacts import ArtifactError, RoutingTable
from eldr_serve.routing import DEFAULT_POLICY, make_policy
from eldr_serve.serving.admission import IngressOptions
from eldr_serve.serving.path import PathOptions


class RouterOptions(BaseModel):
    """The decode router: policy, table, and what happens to state that nobody renews."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    policy: str = Field(
        default=DEFAULT_POLICY,
        description="policy to start with, a name or my_package.module:MyPolicy; PUT /eldr/policy changes it",
    )
    parameters: dict[str, Any] = Field(
        default_factory=dict, description="parameters of the policy, as `band: 0.1` (cosine similarity)"
    )
    table: Path | None = Field(
        default=None,
        description="RoutingTable file to start with, seen from where the app is built; "
        "none: by load until one is swapped in",
    )
    client_timeout_s: float = Field(
        default=30.0, gt=0, description="leases of an ingress silent for longer are dropped, s"
    )
    seed: int = Field(default=0, description="seed of random choices")

    @field_validator("table")
    @classmethod
    def _readable(cls, table: Path | None) -> Path | None:
        if table is not None:
            try:
                RoutingTable.load(table)
            except ArtifactError as error:
                raise ValueError(str(error)) from error
        return table

    @model_validator(mode="after")
    def _can_be_made(self) -> Self:
        make_policy(self.policy, **self.parameters)
        return self


class PrefillRouterOptions(BaseModel):
    """Prefix-hash routing of prompts to prefill replicas."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    max_load_ratio: float = Field(
        default=1.25, ge=1.0, description="a replica above this times the mean load is passed over"
    )
    max_kv_usage: float = Field(
        default=0.95,
        gt=0,
        le=1,
        description="a replica with more than this share of its KV blocks in use takes no new prompt; 1: no "
        "bound. Needs `log_engine_metrics`",
    )


class EldrArgs(BaseModel):
    """The `args` of an application in a deployment YAML.

    `prefill_config` and `decode_config` are Ray Serve LLM's `LLMConfig`; the KV connector, the
    scheduler and the request routers are filled in by `build_app`.
    """

    model_config = ConfigDict(extra="forbid")

    name: str = Field(default="eldr", description="names the DecodeRouter actor; one an application")
    prefill_config: dict[str, Any] = Field(description="LLMConfig of the prefill deployment")
    decode_config: dict[str, Any] = Field(description="LLMConfig of the decode deployment")
    router: RouterOptions = Field(default_factory=RouterOptions)
    prefill_router: PrefillRouterOptions = Field(default_factory=PrefillRouterOptions)
    path: PathOptions = Field(default_factory=PathOptions, description="tries and leases of one request")
    ingress: IngressOptions = Field(default_factory=IngressOptions)
    ingress_deployment_config: dict[str, Any] = Field(
        default_factory=dict, description="Ray Serve deployment options of the ingress (num_replicas, ...)"
    )
    admin_key: SecretStr | None = Field(
        default=None, description="key for PUT /eldr/*; default: the environment's ELDR_ADMIN_KEY"
    )
