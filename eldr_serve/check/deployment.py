"""A deployment YAML as it would be built: its engines, where Ray would put them, and Serve's settings."""

from __future__ import annotations

import eldr_serve.engine.vllm.imports  # noqa: F401

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml
from ray.serve.llm import LLMConfig

from eldr_serve.check.placement import Replicas
from eldr_serve.engine.vllm.compat.serve_llm import engine_placement
from eldr_serve.serving.app import EngineRole, engine_configs, parse
from eldr_serve.serving.config import EldrArgs

APPLICATION = "eldr_serve.serving.app:build_app"
_MODELS = "models"  # beside the deployment: published config.json files, by the model's name in small letters


@dataclass(frozen=True)
class EngineDeployment:
    """The engines of one role.

    Attributes:
        role: what they do.
        config: Ray Serve LLM's.
        least, initial, most: replicas.
        scaled: whether Serve may change their number.
        bundles, strategy: of the placement group of one replica.
        model: its config.json.
    """

    role: EngineRole
    config: LLMConfig
    least: int
    initial: int
    most: int
    scaled: bool
    bundles: list[dict[str, float]]
    strategy: str
    model: str

    @property
    def device(self) -> Literal["gpu", "cpu"]:
        """What the engines run on."""
        return "cpu" if self.config.accelerator_config.kind == "cpu" else "gpu"

    @property
    def ranks(self) -> int:
        """Processes, and GPUs, of one engine."""
        kwargs = self.config.engine_kwargs
        return int(kwargs.get("tensor_parallel_size", 1) * kwargs.get("pipeline_parallel_size", 1))

    @property
    def environment(self) -> dict[str, str]:
        """Of its processes, as far as the file says."""
        return dict((self.config.runtime_env or {}).get("env_vars") or {})

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
        tuple(_engines(role, config, path, model) for role, config in engine_configs(args).items()),
        Replicas("ingress", int(options.get("num_replicas", 1)), [bundle]),
        int(proxy),
        document,
    )


def _engines(role: EngineRole, config: LLMConfig, path: Path, model: Path | None) -> EngineDeployment:
    bundles, strategy = engine_placement(config)
    options = config.deployment_config
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
        config,
        least,
        initial,
        most,
        bool(scaling),
        bundles,
        strategy,
        _model(role, config, path, model),
    )


def _model(role: str, config: LLMConfig, path: Path, given: Path | None) -> str:
    source = config.model_loading_config.model_source or config.model_id
    name = str(source).rpartition("/")[2].lower()
    places = [given, given / "config.json"] if given else [
        Path(str(source)) / "config.json",
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
        f"{role}_config: the config.json of {source} is neither in it nor in {path.parent / _MODELS}; "
        "name one with --model-config"
    )
