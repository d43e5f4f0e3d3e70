"""A deployment YAML as it would be built: its engines, where Ray would put them, and Serve's settings."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from eldr_serve.check.placement import Replicas
from eldr_serve.engine.backend import EngineRole, EngineSpec
from eldr_serve.serving.app import engine_specs, parse
from eldr_serve.serving.config import EldrArgs

APPLICATION = "eldr_serve.serving.app:build_app"
_MODELS = "models"  # beside the deployment: published config.json files, by the model's name in small letters


@dataclass(frozen=True)
class EngineDeployment:
    """The engines of one role.

    Attributes:
        role: what they do.
        spec: what they are.
        least, initial, most: replicas.
        scaled: whether Serve may change their number.
        bundles, strategy: of the placement group of one replica.
        model: its config.json.
    """

    role: EngineRole
    spec: EngineSpec
    least: int
    initial: int
    most: int
    scaled: bool
    bundles: list[dict[str, float]]
    strategy: str
    model: str

    @property
    def replicas(self) -> Replicas:
        """As many as there may be."""
        return Replicas(self.role, self.most, self.bundles, self.strategy)


@dataclass(frozen=True)
class Deployment:
    """What a deployment YAML says.

    Attributes:
        args: of our application.
        engines: of both roles, or whole ones.
        ingress: its replicas.
        proxy_port: Serve's own HTTP port.
        document: the file, as `serve deploy` reads it.
    """

    args: EldrArgs
    engines: tuple[EngineDeployment, ...]
    ingress: Replicas
    proxy_port: int
    document: dict[str, Any]


def read_deployment(path: Path, model: Path | None = None) -> Deployment:
    """Read a deployment YAML.

    Args:
        path: the file.
        model: a config.json, or the folder that holds one; none: the model's own folder, or the published
            one beside the deployment.

    Raises:
        ValueError: it is none of ours, or asks for what cannot be built.
        OSError: a file cannot be read.
    """
    try:
        document = yaml.safe_load(path.read_text())
        (found,) = [app["args"] for app in document["applications"] if app["import_path"] == APPLICATION]
        proxy = (document.get("http_options") or {}).get("port", 8000)
    except (yaml.YAMLError, KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"{path} is not a deployment with one application {APPLICATION}") from error
    args = parse(found)
    options = args.ingress_deployment_config
    actor = options.get("ray_actor_options", {})
    bundle = {"CPU": float(actor.get("num_cpus", 1)), **actor.get("resources", {})}
    return Deployment(
        args,
        tuple(_engines(role, spec, path, model) for role, spec in engine_specs(args).items()),
        Replicas("ingress", int(options.get("num_replicas", 1)), [bundle]),
        int(proxy),
        document,
    )


def _engines(role: EngineRole, spec: EngineSpec, path: Path, model: Path | None) -> EngineDeployment:
    bundles, strategy = spec.placement()
    options = spec.deployment_config
    scaling = options.get("autoscaling_config")
    fixed = options.get("num_replicas")
    if scaling and fixed is not None:
        raise ValueError(f"{role}_config: Serve takes num_replicas or autoscaling_config, not both")
    if scaling:
        least, most = int(scaling.get("min_replicas", 1)), int(scaling.get("max_replicas", 1))
        initial = int(scaling.get("initial_replicas", least))
    else:
        least = initial = most = int(fixed or 1)
    return EngineDeployment(
        role,
        spec,
        least,
        initial,
        most,
        bool(scaling),
        bundles,
        strategy,
        _model(role, spec, path, model),
    )


def _model(role: str, spec: EngineSpec, path: Path, given: Path | None) -> str:
    source = spec.model_source
    name = source.rpartition("/")[2].lower()
    places = [given, given / "config.json"] if given else [
        Path(source) / "config.json",
        path.parent / _MODELS / f"{name}.json",
    ]  # fmt: skip
    for place in places:
        if place.is_file():
            text = place.read_text()
            try:
                json.loads(text)
            except ValueError as error:
                raise ValueError(f"{place} is no JSON: {error}") from error
            return text
    raise ValueError(
        f"{role}_config: the config.json of {source} is neither in a folder of that name nor in "
        f"{path.parent / _MODELS}; nothing is downloaded: get it, and name it with --model-config FILE"
    )
