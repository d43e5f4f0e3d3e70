"""The application that a deployment YAML would build: its engines, their resources, and Serve's settings."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ray.serve.config import AutoscalingConfig

from eldr_serve.config.application import CONFIG_OF_ROLE, EldrArgs
from eldr_serve.engine.backend_protocol import EngineSpec
from eldr_serve.engine.protocol import EngineRole
from eldr_serve.errors import UserInputError
from eldr_serve.preflight.document import Document, check_overrides
from eldr_serve.preflight.node_assignment import ReplicaDemand

_MODELS = "models"  # folder beside the deployment with a config.json for each model, named in lower case


@dataclass(frozen=True)
class EngineDeployment:
    """The engines of one role.

    Attributes:
        role: role of the engines.
        spec: specification of the engines.
        min_replicas, initial_replicas, max_replicas: minimum, initial and maximum number of replicas.
        is_autoscaled: whether Serve may change the number of replicas.
        bundles, strategy: placement group of one replica.
        model_config: content of the model's config.json.
    """

    role: EngineRole
    spec: EngineSpec
    min_replicas: int
    initial_replicas: int
    max_replicas: int
    is_autoscaled: bool
    bundles: list[dict[str, float]]
    strategy: str
    model_config: str

    @property
    def section(self) -> str:
        """Return the name of the engines' configuration in the file."""
        return CONFIG_OF_ROLE[self.role]

    @property
    def arguments_name(self) -> str:
        """Return the name of the engine arguments in the file."""
        return f"{self.section}.engine_kwargs"

    @property
    def is_on_hub(self) -> bool:
        """Return whether the location of the model is a name on the model hub."""
        source = self.spec.model_source
        return not source.startswith(("/", "./", "../")) and "://" not in source

    @property
    def autoscaling_policy(self) -> str | None:
        """Return the name of the autoscaling policy, Serve's own if the file names none; None if unscaled."""
        scaling = self.spec.deployment_config.get("autoscaling_config")
        return str(AutoscalingConfig.model_validate(scaling).policy.policy_function) if scaling else None

    @property
    def nixl_ports(self) -> list[int]:
        """Return the ports of NIXL's side channels of all ranks, at the maximum number of replicas."""
        first = self.spec.ports(self.max_replicas)
        return [port + rank for port in first for rank in range(self.spec.ranks)]

    @property
    def replicas(self) -> ReplicaDemand:
        """Return the maximum number of replicas, to which nodes are assigned."""
        return ReplicaDemand(self.role, self.max_replicas, self.bundles, self.strategy)


@dataclass(frozen=True)
class Deployment:
    """The content of a deployment YAML.

    Attributes:
        args: arguments of the eldr-serve application.
        engines: the prefill and decode deployments, or one of whole replicas.
        ingress: replicas of the ingress.
        proxy: host and port of Serve's own HTTP proxy; None where there is none.
        document: the content of the file, as `serve deploy` reads it.
        ignored: one sentence for each part of the file that Serve or the check ignores.
    """

    args: EldrArgs
    engines: tuple[EngineDeployment, ...]
    ingress: ReplicaDemand
    proxy: tuple[str, int] | None
    document: dict[str, Any]
    ignored: tuple[str, ...] = ()


def build_deployment(path: Path, document: Document, model: Path | None = None) -> Deployment:
    """Build the application of a deployment YAML without deploying it.

    Args:
        path: the file.
        document: its content.
        model: a config.json, or its folder; default: the one in the model's folder, or in the folder `models`
            beside the deployment.

    Raises:
        UserInputError: the application cannot be built.
        OSError: a file cannot be read.
    """
    from eldr_serve.app import build_parts  # this imports vLLM

    application = build_parts(document.application.get("args") or {})
    ignored = (*document.ignored, *check_overrides(document, application.deployment_names))
    options = application.args.ingress_deployment_config
    actor = options.get("ray_actor_options") or {}
    cpus = actor.get("num_cpus")
    bundle = {"CPU": 1.0 if cpus is None else float(cpus), **(actor.get("resources") or {})}
    return Deployment(
        application.args,
        tuple(_build_engines(role, spec, path, model) for role, spec in application.specs.items()),
        ReplicaDemand("ingress", _replica_limits(options)[2], [bundle]),
        document.proxy,
        document.content,
        ignored,
    )


def _build_engines(role: EngineRole, spec: EngineSpec, path: Path, model: Path | None) -> EngineDeployment:
    bundles, strategy = spec.placement_group()
    options = spec.deployment_config
    is_autoscaled = bool(options.get("autoscaling_config"))
    model_config = _read_model_config(role, spec, path, model)
    return EngineDeployment(
        role, spec, *_replica_limits(options), is_autoscaled, bundles, strategy, model_config
    )


def _replica_limits(options: Mapping[str, Any]) -> tuple[int, int, int]:
    """Return the minimum, initial and maximum number of replicas of a deployment."""
    if not options.get("autoscaling_config"):
        replicas = int(options.get("num_replicas", 1))
        return replicas, replicas, replicas
    scaling = AutoscalingConfig.model_validate(options["autoscaling_config"])
    least = int(scaling.min_replicas)
    initial = scaling.initial_replicas
    return least, least if initial is None else int(initial), int(scaling.max_replicas)


def _read_model_config(role: EngineRole, spec: EngineSpec, path: Path, model: Path | None) -> str:
    """Return the content of a model's config.json; `path` and `model` as for `build_deployment`."""
    source = spec.model_source
    name = source.rpartition("/")[2].lower()
    places = (
        [model, model / "config.json"]
        if model
        else [Path(source) / "config.json", path.parent / _MODELS / f"{name}.json"]
    )
    for place in places:
        if place.is_file():
            text = place.read_text()
            try:
                json.loads(text)
            except ValueError as error:
                raise UserInputError(f"{place} is not JSON: {error}") from error
            return text
    raise UserInputError(
        f"{CONFIG_OF_ROLE[role]}.model_loading_config.model_source is {source!r}: its config.json is neither "
        f"in a folder of that name nor in {path.parent / _MODELS}; `eldr check` downloads nothing: download "
        "it yourself, and give it with --model-config FILE"
    )
