"""The interface of a kind of engine, through which deployments are built, checked and calibrated.

`eldr_serve.engine.vllm.backend` implements it with vLLM. `eldr_serve.engine.protocol` is for running engines.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from eldr_serve.engine.protocol import CalibrationEngine, Device, Engine, EngineRole, StepSizes
from eldr_serve.experts.expert_placement import ExpertPlacement


class EngineSpec(Protocol):
    """The engines of one role, as configured by a deployment's `prefill_config` or `decode_config`.

    Attributes:
        model_id: the model name that requests use.
        model_source: location of the model: a folder, a URL, or a name on the model hub.
        tokenizer: location of the tokenizer, in the same form as `model_source`.
        model_cards: the entries of the model and of its adapters in `GET /v1/models`, the model's first.
        adapters: names of the LoRA adapters, in the order in which an engine loads them.
        adapter_slots: number of adapters that an engine keeps in memory.
        deployment_name: name of the Ray Serve deployment, without the prefix.
        deployment_config: options of the Ray Serve deployment.
        device: the hardware that the engines run on.
        ranks: number of processes, and of GPUs, of one engine.
        environment: environment variables that the file sets for the engine's processes.
        host_kv_gib: size of a CPU engine's KV cache, GiB; None if the file does not set it.
        host_kv_variable: environment variable that sets this size.
        fixed_port_variable: environment variable that would give all replicas the same port.
    """

    @property
    def model_id(self) -> str: ...
    @property
    def model_source(self) -> str: ...
    @property
    def tokenizer(self) -> str: ...
    @property
    def model_cards(self) -> list[dict[str, Any]]: ...
    @property
    def adapters(self) -> tuple[str, ...]: ...
    @property
    def adapter_slots(self) -> int: ...
    @property
    def deployment_name(self) -> str: ...
    @property
    def deployment_config(self) -> dict[str, Any]: ...
    @property
    def device(self) -> Device: ...
    @property
    def ranks(self) -> int: ...
    @property
    def environment(self) -> dict[str, str]: ...
    @property
    def host_kv_gib(self) -> float | None: ...
    @property
    def host_kv_variable(self) -> str: ...
    @property
    def fixed_port_variable(self) -> str: ...

    def ports(self, replicas: int) -> list[int]:
        """Return the first port that each replica listens on; each rank takes one, consecutively."""

    def placement_group(self) -> tuple[list[dict[str, float]], str]:
        """Return the bundles and the strategy of the placement group of one replica."""

    def arguments(self) -> dict[str, Any]:
        """Return the engine's arguments without the model, for `EngineBackend.describe`; JSON types."""

    def check_live_expert_placement(self, placement: ExpertPlacement) -> None:
        """Raise ConfigurationError if the engines could not take the placement while they serve.

        Layers and experts are not compared, since the model is not known here.
        """

    def deployment(self, server: type, *, name_prefix: str, **arguments: Any) -> Any:
        """Build the Ray Serve deployment of these engines. Ray need not be running.

        Args:
            server: class of a replica; it is called with `llm_config`, the argument of `EngineBackend.start`.
            name_prefix: prefix of the deployment's name, before the model's name.
            arguments: further arguments of the class.
        """


class EngineDescription(Protocol):
    """An engine as it would be on a given machine; it computes nothing. Sizes are of one rank.

    Attributes:
        max_model_len: maximum number of tokens of a prompt and its answer.
        memory_utilization: share of a GPU's memory that the engine may take.
        shared_arguments: resolved arguments that prefill and decode must share; JSON types.
    """

    max_model_len: int
    memory_utilization: float
    shared_arguments: Mapping[str, Any]

    def weight_bytes(self) -> int:
        """Return the size of the parameters, bytes."""

    def kernels(self) -> set[tuple[str, bool]]:
        """Return (name, whether it reveals the experts that it chooses) of the MoE layers' kernels."""

    def expert_shape(self) -> tuple[int, int]:
        """Return (MoE layers, experts of a layer); zeros without MoE layers."""

    def largest_step(self) -> StepSizes:
        """Return the sizes of the largest step."""

    def check_counting(self) -> None:
        """Raise ConfigurationError if an engine that counts experts would not start."""

    def kv_cache(self, available: int) -> tuple[int, float]:
        """Return the capacity of a KV cache: tokens, and concurrent sequences of max_model_len tokens.

        Args:
            available: size of the KV cache, bytes.

        Raises:
            ValueError: the cache cannot hold one sequence.
        """


class EngineBackend(Protocol):
    """A kind of engine. Every process may create one: its methods import the engine software.

    Attributes:
        describe_environment: environment variables of a process that calls `describe`.
    """

    describe_environment: Mapping[str, str]

    def import_software(self) -> None:
        """Import the engine software; call it before any other module may import that software."""

    def check_versions(self) -> None:
        """Raise RuntimeError if an installed package is not a supported version."""

    def version(self) -> str:
        """Return the version of the engine software."""

    def request_types(self) -> Mapping[str, Any]:
        """Return the types of clients' requests by method (see EngineRequest)."""

    def check_config(self, where: str, config: Mapping[str, Any]) -> None:
        """Check names and simple values of a role's configuration without importing the engine software.

        Args:
            where: name of the configuration in the file.
            config: the configuration; it is not modified.

        Raises:
            ConfigurationError: a name or value is wrong.
        """

    def spec(self, role: EngineRole, config: dict[str, Any], *, kv_lease_s: float) -> EngineSpec:
        """Return the specification of the engines, including the settings that expert counts need.

        Args:
            role: role of the engines.
            config: the role's configuration; it is modified.
            kv_lease_s: seconds for which a prefill engine keeps a finished prompt's blocks.

        Raises:
            ValueError, TypeError: the configuration cannot be used; a ValidationError names the location.
        """

    def compare(self, prefill: EngineSpec, decode: EngineSpec) -> None:
        """Raise ConfigurationError unless both roles agree on the fields that must be equal."""

    def differences(self, prefill: Mapping[str, Any], decode: Mapping[str, Any]) -> list[str]:
        """Return one sentence for each field that must be equal but differs.

        Args:
            prefill, decode: resolved arguments of both roles (EngineDescription.shared_arguments).
        """

    async def start(self, config: Any) -> Engine:
        """Start the engine of a replica."""

    def deployment_options(self, config: Any) -> dict[str, Any]:
        """Return the options of the engine's Ray Serve deployment, with the resources of a replica."""

    def describe(
        self, model: Path, arguments: dict[str, Any], memory_gib: float, capability: tuple[int, int] | None
    ) -> EngineDescription:
        """Return an engine as it would be on a machine, without starting it.

        Args:
            model: folder with the model's config.json.
            arguments: the engine's arguments, as EngineSpec.arguments returns them.
            memory_gib: memory of the GPU, GiB.
            capability: CUDA compute capability of the GPU; None: the engine runs on a CPU.
        """

    def calibration_settings(
        self, model: str, device: Device, arguments: dict[str, Any]
    ) -> tuple[dict[str, Any], dict[str, str]]:
        """Return the settings for `start_calibration`, and the environment variables of its process.

        Args:
            model: location of the model.
            device: the hardware that the engine runs on.
            arguments: arguments of a deployment's engine.
        """

    def start_calibration(self, settings: dict[str, Any], port: int) -> CalibrationEngine:
        """Start an engine for calibration.

        Args:
            settings: see `calibration_settings`.
            port: first port at which its ranks may listen.
        """
