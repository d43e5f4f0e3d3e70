"""The application that a deployment YAML would build: its engines, their resources, and Serve's settings."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ray.serve.config import AutoscalingConfig

from eldr_serve.config.application import EldrArgs
from eldr_serve.engine.protocol import EngineRole
from eldr_serve.errors import UserInputError
from eldr_serve.preflight.document import Document, check_overrides
from eldr_serve.preflight.placement import ReplicaDemand

if TYPE_CHECKING:
    from eldr_serve.engine.active_backend import EngineSpec

_MODELS = "models"  # folder beside the deployment with config.json files, by model name in small letters


@dataclass(frozen=True)
class EngineDeployment:
    """The engines of one role.

    Attributes:
        role: role of the engines.
        spec: specification of the engines.
        min_replicas, initial_replicas, max_replicas: minimum, initial and maximum number of replicas.
        scaled: whether Serve may change the number of replicas.
        bundles, strategy: placement group of one replica.
        model: content of the model's config.json.
    """

    role: EngineRole
    spec: EngineSpec
    min_replicas: int
    initial_replicas: int
    max_replicas: int
    scaled: bool
    bundles: list[dict[str, float]]
    strategy: str
    model: str

    @property
    def config(self) -> str:
        """Return the name of the engines' configuration in the file."""
        return "prefill_config" if self.role == "prefill" else "decode_config"

    @property
    def where(self) -> str:
        """Return the name of the engine arguments in the file."""
        return f"{self.config}.engine_kwargs"

    @property
    def on_hub(self) -> bool:
        """Return whether the location of the model is a name on the model hub."""
        source = self.spec.model_source
        return not source.startswith(("/", "./", "../")) and "://" not in source

    @property
    def nixl_ports(self) -> list[int]:
        """Return the ports of NIXL's side channels of all ranks, at the maximum number of replicas."""
        first = self.spec.ports(self.max_replicas)
        return [port + rank for port in first for rank in range(self.spec.ranks)]

    @property
    def replicas(self) -> ReplicaDemand:
        """Return the maximum number of replicas, for placement."""
        return ReplicaDemand(self.role, self.max_replicas, self.bundles, self.strategy)


@dataclass(frozen=True)
class Deployment:
    """The content of a deployment YAML.

    Attributes:
        args: arguments of the eldr-serve application.
        engines: the prefill and decode deployments, or one of whole engines.
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
    from eldr_serve.app import build  # imports vLLM

    built = build(document.application.get("args") or {})
    ignored = (*document.ignored, *check_overrides(document, built.deployment_names))
    options = built.args.ingress_deployment_config
    actor = options.get("ray_actor_options") or {}
    cpus = actor.get("num_cpus")
    bundle = {"CPU": 1.0 if cpus is None else float(cpus), **(actor.get("resources") or {})}
    return Deployment(
        built.args,
        tuple(_engines(role, spec, path, model) for role, spec in built.specs.items()),
        ReplicaDemand("ingress", _replicas(options)[2], [bundle]),
        document.proxy,
        document.content,
        ignored,
    )


def _engines(role: EngineRole, spec: EngineSpec, path: Path, model: Path | None) -> EngineDeployment:
    bundles, strategy = spec.placement()
    options = spec.deployment_config
    scaled = bool(options.get("autoscaling_config"))
    return EngineDeployment(
        role, spec, *_replicas(options), scaled, bundles, strategy, _model(role, spec, path, model)
    )


def _replicas(options: Mapping[str, Any]) -> tuple[int, int, int]:
    """Return the minimum, initial and maximum number of replicas of a deployment."""
    if not options.get("autoscaling_config"):
        fixed = int(options.get("num_replicas", 1))
        return fixed, fixed, fixed
    scaling = AutoscalingConfig.model_validate(options["autoscaling_config"])
    least = int(scaling.min_replicas)
    initial = scaling.initial_replicas
    return least, least if initial is None else int(initial), int(scaling.max_replicas)


def _model(role: str, spec: EngineSpec, path: Path, given: Path | None) -> str:
    config = "prefill_config" if role == "prefill" else "decode_config"
    source = spec.model_source
    name = source.rpartition("/")[2].lower()
    places = (
        [given, given / "config.json"]
        if given
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
        f"{config}.model_loading_config.model_source is {source!r}: its config.json is neither in a folder "
        f"of that name nor in {path.parent / _MODELS}; nothing is downloaded: download it, and give it with "
        "--model-config FILE"
    )
