"""Checks of a Ray Serve deployment's options by Serve's own schema, before anything is built."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import BaseModel, ValidationError
from ray import serve
from ray.serve.config import AutoscalingConfig, RequestRouterConfig
from ray.serve.schema import DeploymentSchema, RayActorOptionsSchema

from eldr_serve.errors import ConfigurationError
from eldr_serve.validation import first_problem, format_value, unknown_name

_UNSUPPORTED = {"_func_or_class", "version"}
_PLACEMENT_OPTIONS = {"placement_group_bundles", "placement_group_strategy"}
# Nested options, in which Serve ignores unknown names.
_NESTED: dict[str, type[BaseModel]] = {
    "autoscaling_config": AutoscalingConfig,
    "ray_actor_options": RayActorOptionsSchema,
    "request_router_config": RequestRouterConfig,
}


def check_options(where: str, options: Mapping[str, Any], *, engines: bool) -> None:
    """Raise ConfigurationError unless Serve accepts these options of a deployment.

    Args:
        where: location of the options in the file.
        options: the options in the file.
        engines: whether this is an engine deployment, whose placement group is configured elsewhere.
    """
    valid_names = set(inspect.signature(serve.deployment).parameters) - _UNSUPPORTED
    for name in _PLACEMENT_OPTIONS & options.keys() if engines else ():
        raise ConfigurationError(f"{where}.{name}: set placement_group_config instead, next to {where}")
    _check_names(where, options, valid_names)
    if options.get("num_replicas") is not None:
        _check_num_replicas(where, options)
    for name, model in _NESTED.items():
        part = options.get(name)
        if isinstance(part, Mapping):
            _check_names(f"{where}.{name}", part, model.model_fields)
            _check_schema(f"{where}.{name}", part, model)
    try:
        DeploymentSchema.model_validate({"name": "any"} | {k: v for k, v in options.items() if v is not None})
    except ValidationError as error:
        raise ConfigurationError(
            first_problem(error, options, where=where, model=DeploymentSchema)
        ) from error


def _check_num_replicas(where: str, options: Mapping[str, Any]) -> None:
    number = options["num_replicas"]
    if options.get("autoscaling_config"):
        raise ConfigurationError(
            f"{where} has num_replicas {format_value(number)} and autoscaling_config: "
            "Serve accepts one of them, not both: remove one"
        )
    if isinstance(number, bool) or not isinstance(number, int) or number < 1:
        remedy = ": give autoscaling_config with min_replicas and max_replicas" if number == "auto" else ""
        raise ConfigurationError(
            f"{where}.num_replicas must be a whole number, at least 1, got {format_value(number)}{remedy}"
        )


def _check_schema(where: str, options: Any, model: type[BaseModel]) -> None:
    try:
        model.model_validate(options)
    except ValidationError as error:
        raise ConfigurationError(first_problem(error, options, where=where, model=model)) from error


def _check_names(where: str, options: Mapping[str, Any], valid_names: Iterable[str]) -> None:
    for name in options:
        if name not in valid_names:
            raise ConfigurationError(unknown_name(where, name, valid_names))
