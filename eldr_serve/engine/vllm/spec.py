"""Ray Serve LLM's configuration of a deployment's vLLM engines, completed with eldr_serve's settings.

It is completed where the application is built; Ray sends it to the replicas.
"""

from __future__ import annotations

import eldr_serve.engine.vllm.imports  # noqa: F401

import time
from dataclasses import dataclass
from typing import Any

from ray.serve.deployment import Application
from ray.serve.llm import LLMConfig, build_llm_deployment
from vllm.config import LoRAConfig

from eldr_serve.data_root import model_folder
from eldr_serve.engine.protocol import Device, EngineRole
from eldr_serve.engine.vllm.adapters import parse_adapters
from eldr_serve.engine.vllm.compat.checked import configuration_errors
from eldr_serve.engine.vllm.compat.serve_llm import (
    LocalModel,
    LoRAModulePath,
    OneProcessLLMConfig,
    deployment_name,
    engine_placement,
    to_model_metadata,
)
from eldr_serve.engine.vllm.config import CONFIG_KEY, ENVIRONMENT, ONE_PROCESS, engine_kwargs
from eldr_serve.engine.vllm.ep.plugin import EXPERT_PARALLEL_ENV
from eldr_serve.engine.vllm.experts_config import CpuExpertsConfig, ExpertsConfig, parse_experts_config
from eldr_serve.engine.vllm.ranks import check_gpus, data_ranks, model_ranks, runs_in_one_process
from eldr_serve.errors import ConfigurationError
from eldr_serve.experts.expert_placement import ExpertPlacement

# First port of the NIXL side channels; each replica adds an offset by its number.
_PORT_BASE: dict[EngineRole, int] = {"prefill": 20000, "decode": 22000, "whole": 22000}


def make_llm_config(role: EngineRole, config: dict[str, Any], *, kv_lease_s: float) -> LLMConfig:
    """Return Ray's LLMConfig with EldrConnector and eldr_serve's scheduler added; see EngineBackend.spec."""
    for part in ("engine_kwargs", "experimental_configs", "runtime_env"):
        config[part] = config.get(part) or {}
    loading = config.get("model_loading_config") or {}
    source = loading.get("model_source")
    folder = model_folder(source) if isinstance(source, str) else None
    if folder:
        loading["model_source"] = folder  # the path is absolute, since replicas run elsewhere
        config.setdefault("callback_config", {"callback_class": LocalModel})
    accelerator = (config.get("accelerator_config") or {}).get("kind", "gpu")
    arguments = config["engine_kwargs"]
    arguments = arguments | parse_adapters(
        arguments,
        model_id=loading.get("model_id", ""),
        on_cpu=accelerator == "cpu",
        model_is_here=folder is not None,
    )
    config["engine_kwargs"] = engine_kwargs(role, device=accelerator, kv_lease_s=kv_lease_s, **arguments)
    # By default Serve LLM batches streamed tokens for 50 ms, which would distort the inter-token latency.
    experimental = {"stream_batching_interval_ms": 0, "NIXL_SIDE_CHANNEL_PORT_BASE": _PORT_BASE[role]}
    config["experimental_configs"] = experimental | config["experimental_configs"]
    config_class = LLMConfig
    environment = config["runtime_env"]["env_vars"] = config["runtime_env"].get("env_vars") or {}
    for variable, value in ENVIRONMENT.items():
        environment.setdefault(variable, value)
    if accelerator == "gpu":
        check_gpus(config)
    if runs_in_one_process(config["engine_kwargs"], accelerator):
        config_class = OneProcessLLMConfig
        # Ray would infer a CPU from bundles without GPUs; the replica has the engine's CPUs.
        config["accelerator_config"] = config.get("accelerator_config") or {"kind": accelerator}
        config["engine_kwargs"].pop("distributed_executor_backend", None)  # Ray knows only its own names
        environment.update(ONE_PROCESS | environment)
    completed: LLMConfig = config_class.model_validate(config)
    completed.get_engine_config().get_initialization_kwargs()  # raise errors here, not in a replica
    return completed


@dataclass(frozen=True)
class VllmSpec:
    """The implementation of EngineSpec with Ray Serve LLM's configuration.

    Attributes:
        config: Ray Serve LLM's configuration.
    """

    config: LLMConfig
    fixed_port_variable = "VLLM_NIXL_SIDE_CHANNEL_PORT"
    host_kv_variable = "VLLM_CPU_KVCACHE_SPACE"

    @property
    def model_id(self) -> str:
        """Return the model name that requests use."""
        return str(self.config.model_id)

    @property
    def model_source(self) -> str:
        """Return the location of the model: a folder, a URL, or a name on the model hub."""
        return str(self.config.model_loading_config.model_source or self.model_id)

    @property
    def tokenizer(self) -> str:
        """Return the location of the tokenizer, in the same form as `model_source`."""
        return str(self.config.model_loading_config.tokenizer_source or self.model_source)

    @property
    def model_cards(self) -> list[dict[str, Any]]:
        """Return the entries of the model and of its adapters in `GET /v1/models`."""
        created = {"created": int(time.time())}
        cards = [to_model_metadata(self.model_id, self.config).model_dump() | created]
        for module in self._adapters:
            card = to_model_metadata(module.name, self.config, {"model_id": module.name}).model_dump()
            cards.append(card | created | {"root": module.path, "parent": self.model_id})
        return cards

    @property
    def _adapters(self) -> list[LoRAModulePath]:
        return self.config.engine_kwargs.get("lora_modules") or []

    @property
    def adapters(self) -> tuple[str, ...]:
        """Return the names of the LoRA adapters, in the order in which an engine loads them."""
        return tuple(module.name for module in self._adapters)

    @property
    def adapter_slots(self) -> int:
        """Return the number of adapters that an engine keeps in memory."""
        kwargs = self.config.engine_kwargs
        return int(kwargs.get("max_cpu_loras") or kwargs.get("max_loras") or LoRAConfig.max_loras)

    @property
    def deployment_config(self) -> dict[str, Any]:
        """Return the options of the Ray Serve deployment."""
        options: dict[str, Any] = self.config.deployment_config
        return options

    @property
    def device(self) -> Device:
        """Return the hardware that the engines run on."""
        return "cpu" if self.config.accelerator_config.kind == "cpu" else "gpu"

    @property
    def ranks(self) -> int:
        """Return the number of processes, and of GPUs, of one engine."""
        kwargs = self.config.engine_kwargs
        return model_ranks(kwargs) * data_ranks(kwargs)

    @property
    def environment(self) -> dict[str, str]:
        """Return the environment variables that the file sets for the engine's processes."""
        return dict((self.config.runtime_env or {}).get("env_vars") or {})

    @property
    def host_kv_gib(self) -> float | None:
        """Return the size of a CPU engine's KV cache, GiB; None if the file does not set it."""
        value = self.environment.get(self.host_kv_variable)
        return None if value is None else float(value)

    @property
    def deployment_name(self) -> str:
        """Return the name of the Ray Serve deployment, without the prefix."""
        return str(self.deployment_config.get("name") or deployment_name(self.config))

    def ports(self, replicas: int) -> list[int]:
        """Return the first port of each replica's NIXL side channel; each rank takes one, consecutively."""
        fixed = self.environment.get(self.fixed_port_variable)
        if fixed is not None:
            return [int(fixed)] * replicas
        base = int(self.config.experimental_configs["NIXL_SIDE_CHANNEL_PORT_BASE"])
        return [base + replica_number * self.ranks for replica_number in range(replicas)]

    def placement_group(self) -> tuple[list[dict[str, float]], str]:
        """Return the bundles and the strategy of the placement group of one replica."""
        return engine_placement(self.config)

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of AsyncEngineArgs without the model; JSON types."""
        kwargs: dict[str, Any] = self.config.get_engine_config().engine_kwargs
        return kwargs

    def check_live_expert_placement(self, placement: ExpertPlacement) -> None:
        """Raise ConfigurationError if the engines could not take the placement while they serve."""
        kwargs = self.config.engine_kwargs
        if data_ranks(kwargs) > 1:
            raise ConfigurationError("data-parallel ranks cannot change their experts while they serve")
        redundant = self._gpu_redundant_slots() if self.device == "gpu" else self._cpu_redundant_slots()
        if placement.ranks != self.ranks:
            raise ConfigurationError(
                f"the placements are for {placement.ranks} ranks, and the engines have {self.ranks}"
            )
        if redundant is not None and placement.num_redundant != redundant:
            name = "num_redundant_experts of eplb_config"
            if self.device == "cpu":
                name = f"redundant_experts of {CONFIG_KEY}"
            raise ConfigurationError(
                f"the placements have {placement.num_redundant} redundant slots, and the engines have "
                f"{redundant}: set {name}"
            )

    def _cpu_redundant_slots(self) -> int | None:
        """Return the redundant slots of a layer; None: those of the configured placement.

        Raises:
            ConfigurationError: the engines are not expert-parallel.
        """
        kwargs = self.config.engine_kwargs
        if not kwargs.get("enable_expert_parallel") or self.environment.get(EXPERT_PARALLEL_ENV) != "1":
            raise ConfigurationError(
                f"the engines are not expert-parallel: set enable_expert_parallel and {EXPERT_PARALLEL_ENV}=1"
            )
        with configuration_errors():
            settings = (kwargs.get("additional_config") or {}).get(CONFIG_KEY, {})
            config = parse_experts_config(CpuExpertsConfig, settings)
        # The slots of a configured placement are known only where its file is.
        is_known = config.redundant_experts is not None or config.placement is not None
        return config.redundant_experts if is_known else 0

    def _gpu_redundant_slots(self) -> int:
        """Return the redundant slots of a layer.

        Raises:
            ConfigurationError: the engines could not move experts while they serve.
        """
        kwargs = self.config.engine_kwargs
        settings = (kwargs.get("additional_config") or {}).get(CONFIG_KEY)
        if settings is None or not kwargs.get("enable_expert_parallel") or not kwargs.get("enable_eplb"):
            raise ConfigurationError(
                "the engines cannot move experts while they serve: set enable_expert_parallel, enable_eplb "
                f"and additional_config's {CONFIG_KEY}"
            )
        with configuration_errors():
            choice = parse_experts_config(ExpertsConfig, settings).replica_choice
        if choice != "even":
            raise ConfigurationError(
                f"engines on GPUs with replica_choice {choice} cannot move experts while they serve: set "
                f"{CONFIG_KEY}.replica_choice to even"
            )
        return int((kwargs.get("eplb_config") or {}).get("num_redundant_experts", 0))

    def deployment(self, server: type, *, name_prefix: str, **arguments: Any) -> Application:
        """Build the Ray Serve deployment of these engines. Ray need not be running."""
        return build_llm_deployment(
            self.config, name_prefix=name_prefix, deployment_cls=server, bind_kwargs=arguments
        )
