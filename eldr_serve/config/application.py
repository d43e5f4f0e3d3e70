"""Schema of a deployment YAML: Ray Serve LLM configurations and how requests move between them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, SecretStr, ValidationError, field_validator

from eldr_serve.config.deployment_options import check_options
from eldr_serve.engine.active_backend import BACKEND
from eldr_serve.errors import ConfigurationError
from eldr_serve.ingress.options import IngressOptions
from eldr_serve.pipeline.path_options import PathOptions, PrefillRouterOptions
from eldr_serve.router.settings import RouterSettings
from eldr_serve.signatures.settings import SignatureOptions
from eldr_serve.validation import first_problem

CONFIG_OF_ROLE = {"prefill": "prefill_config", "decode": "decode_config", "whole": "decode_config"}
DRAIN_S = 600.0  # time for open streams to end when a replica is scaled down or updated
AUTOSCALING_POLICY = "eldr_serve.replicas.autoscaling:compute_desired_replicas"
_MIN_CORES_FOR_TWO = 4  # with as many cores, two ingresses leave some cores to other processes


def default_ingresses() -> int:
    """Return 2 if there are enough cores, else 1; one of two serves while the other is lost or replaced."""
    return 2 if len(os.sched_getaffinity(0)) >= _MIN_CORES_FOR_TWO else 1


class EldrArgs(BaseModel):
    """The `args` of an application in a deployment YAML.

    `prefill_config` and `decode_config` are Ray Serve LLM's `LLMConfig`. `build_app` fills in the KV
    connector, the scheduler and the request routers. Without `prefill_config`, the engines of
    `decode_config` are whole replicas, which also prefill (aggregated serving).
    """

    model_config = ConfigDict(extra="forbid")

    name: str = Field(default="eldr", description="name of the DecodeRouter actor; unique per application")
    prefill_config: dict[str, Any] | None = Field(
        default=None,
        description="LLMConfig of the prefill deployment (disaggregated serving); null: decode engines also "
        "prefill (aggregated serving)",
    )
    decode_config: dict[str, Any] = Field(description="LLMConfig of the decode deployment")
    router: RouterSettings = Field(default_factory=RouterSettings)
    signatures: SignatureOptions = Field(
        default_factory=SignatureOptions, description="sampling of live traffic and routing tables"
    )
    prefill_router: PrefillRouterOptions = Field(default_factory=PrefillRouterOptions)
    path: PathOptions = Field(default_factory=PathOptions, description="retries and leases of one request")
    ingress: IngressOptions = Field(default_factory=IngressOptions)
    ingress_deployment_config: dict[str, Any] = Field(
        default_factory=dict,
        validate_default=True,
        description="Ray Serve deployment options of the ingress (num_replicas, ...); default: 2 replicas if "
        "the machine that builds the application has at least 4 cores, else 1; the port refuses connections "
        "while a single replica is replaced",
    )
    admin_key: SecretStr | None = Field(
        default=None,
        description="key for all of /eldr/ except /eldr/, /eldr/status and /eldr/ready; "
        "default: the environment's ELDR_ADMIN_KEY",
    )

    @field_validator("ingress_deployment_config")
    @classmethod
    def _fill_in_defaults(cls, value: dict[str, Any]) -> dict[str, Any]:
        """Fill in drain time, autoscaling policy and replicas, where Serve's defaults do not fit."""
        options = {"graceful_shutdown_timeout_s": DRAIN_S}
        options |= {name: option for name, option in value.items() if option is not None}
        if scaling := options.get("autoscaling_config"):
            if isinstance(scaling, dict):
                options["autoscaling_config"] = {"policy": {"policy_function": AUTOSCALING_POLICY}} | scaling
        else:
            options.setdefault("num_replicas", default_ingresses())
        return options


def parse(args: Any) -> EldrArgs:
    """Validate the `args` of an application as far as possible without importing engine code.

    Raises:
        ConfigurationError: a name or value is invalid; the first one is named.
    """
    try:
        parsed = EldrArgs.model_validate(args)
    except ValidationError as error:
        raise ConfigurationError(first_problem(error, args, model=EldrArgs)) from error
    check_options("ingress_deployment_config", parsed.ingress_deployment_config, engines=False)
    for where, config in _engine_configs(parsed):
        BACKEND.check_config(where, config)
        check_options(f"{where}.deployment_config", config.get("deployment_config") or {}, engines=True)
    return parsed


def _engine_configs(parsed: EldrArgs) -> Iterator[tuple[str, Mapping[str, Any]]]:
    if parsed.prefill_config is not None:
        yield "prefill_config", parsed.prefill_config
    yield "decode_config", parsed.decode_config
