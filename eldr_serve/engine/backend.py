"""Interfaces to configure, check, start and calibrate engines of one kind; `chosen` selects the kind.

A backend is cheap to import: its methods, or `load`, import the engine software when they need it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from ray.serve.deployment import Application

from eldr_serve.engine.protocol import Engine, Tracer

EngineRole = Literal["prefill", "decode", "whole"]
Device = Literal["gpu", "cpu"]


@dataclass(frozen=True)
class Step:
    """Sizes of the largest step of one rank.

    Attributes:
        tokens: `max_num_batched_tokens`.
        sequences: `max_num_seqs`.
        hidden: hidden size.
        top_k: experts per token.
        expert_width: intermediate size of an expert on this rank.
        vocabulary: number of tokens in the vocabulary.
        element: size of an activation, bytes.
    """

    tokens: int
    sequences: int
    hidden: int
    top_k: int
    expert_width: int
    vocabulary: int
    element: int


class EngineSpec(Protocol):
    """The engines of one role, as configured by a deployment's `prefill_config` or `decode_config`."""

    @property
    def model_id(self) -> str:
        """Return the model name that requests use."""

    @property
    def model_source(self) -> str:
        """Return the location of the model: a folder, a URL, or a name on the model hub."""

    @property
    def tokenizer(self) -> str:
        """Return the location of the tokenizer, in the same form as `model_source`."""

    @property
    def model_card(self) -> dict[str, Any]:
        """Return the model's entry in `GET /v1/models`."""

    @property
    def deployment_config(self) -> dict[str, Any]:
        """Return the options of the Ray Serve deployment."""

    @property
    def device(self) -> Device:
        """Return the hardware that the engines run on."""

    @property
    def ranks(self) -> int:
        """Return the number of processes, and of GPUs, of one engine."""

    @property
    def environment(self) -> dict[str, str]:
        """Return the environment variables that the file sets for the engine's processes."""

    @property
    def host_kv_gib(self) -> float | None:
        """Return the size of a CPU engine's KV cache, GiB; None if the file does not set it."""

    @property
    def fixed_port(self) -> str:
        """Return the environment variable that would give all replicas the same NIXL port."""

    @property
    def host_kv_variable(self) -> str:
        """Return the environment variable that sets the size of a KV cache on a CPU."""

    @property
    def deployment_name(self) -> str:
        """Return the name of the Ray Serve deployment, without the prefix."""

    def ports(self, replicas: int) -> list[int]:
        """Return the first port of each replica's NIXL side channel, in the order of the replicas."""

    def placement(self) -> tuple[list[dict[str, float]], str]:
        """Return bundles and strategy of the placement group of one replica."""

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of one engine for `Backend.describe`; JSON types."""

    def deployment(self, server: type, *, name_prefix: str, **arguments: Any) -> Application:
        """Build the Ray Serve deployment of these engines. Ray need not be running.

        Args:
            server: class of a replica; it is called with `llm_config`, the argument of `Backend.start`.
            name_prefix: prefix of the deployment's name, before the model's name.
            arguments: further arguments of the class.
        """


class Described(Protocol):
    """An engine on a described machine; it computes nothing. Sizes are those of one rank."""

    max_model_len: int  # maximum number of tokens of a prompt and its answer
    memory_utilization: float  # share of a GPU's memory that the engine may take
    agreed: Mapping[str, Any]  # resolved arguments that prefill and decode must share; JSON types

    def weight_bytes(self) -> int:
        """Return the size of the parameters, bytes."""

    def kernels(self) -> set[tuple[str, bool]]:
        """Return (name, whether it hides the experts that it chooses) of the MoE layers' kernels."""

    def step(self) -> Step:
        """Return the sizes of the largest step."""

    def check(self) -> None:
        """Raise ConfigurationError if an engine that counts experts would not start."""

    def kv_cache(self, available: int) -> tuple[int, float]:
        """Return the capacity of a KV cache of `available` bytes.

        Returns:
            Number of tokens, and number of concurrent sequences of max_model_len tokens.

        Raises:
            ValueError: the cache cannot hold one sequence.
        """


class Backend(Protocol):
    """A kind of engine."""

    describing: Mapping[str, str]  # environment variables of a process that calls `describe`

    def load(self) -> None:
        """Import the engine software; call it before any other module may import that software."""

    def check(self) -> None:
        """Raise RuntimeError, one sentence, if an installed package is not a supported version."""

    def version(self) -> str:
        """Return the version of the engine software."""

    def requests(self) -> Mapping[str, Any]:
        """Return the types of clients' requests by method (see EngineRequest)."""

    def check_config(self, where: str, config: Mapping[str, Any]) -> None:
        """Check names and simple values of a role's configuration without importing engine code.

        Args:
            where: name of the configuration in the file.
            config: the configuration; it is not modified.

        Raises:
            ConfigurationError: a name or value is wrong; one sentence.
        """

    def compare(self, prefill: EngineSpec, decode: EngineSpec) -> None:
        """Raise ConfigurationError unless both roles agree on the fields that must be equal."""

    def differences(self, prefill: Mapping[str, Any], decode: Mapping[str, Any]) -> list[str]:
        """Return one sentence for each field that must be equal but differs.

        Args:
            prefill, decode: see Described.agreed.
        """

    def spec(self, role: EngineRole, config: dict[str, Any], *, kv_lease_s: float) -> EngineSpec:
        """Return the specification of the engines, with the settings added that expert counts need.

        Args:
            role: role of the engines.
            config: the role's configuration; it is modified.
            kv_lease_s: how long a prefill engine keeps a finished prompt's blocks, s.

        Raises:
            ValueError, TypeError: the configuration cannot be used; a ValidationError has the location.
        """

    async def start(self, config: Any) -> Engine:
        """Start the engine of a replica."""

    def deployment_options(self, config: Any) -> dict[str, Any]:
        """Return the options of the Ray Serve deployment, with the resources of a replica."""

    def describe(
        self, model: Path, arguments: dict[str, Any], memory_gib: float, capability: tuple[int, int] | None
    ) -> Described:
        """Return an engine as it would be on a machine.

        Args:
            model: folder with the model's config.json.
            arguments: see EngineSpec.arguments.
            memory_gib: memory of the GPU, GiB.
            capability: CUDA compute capability of the GPU; None: the engine runs on a CPU.

        Raises:
            ValueError, NotImplementedError, AssertionError: the engine would not start.
        """

    def tracing(
        self, model: str, device: Device, arguments: dict[str, Any]
    ) -> tuple[dict[str, Any], dict[str, str]]:
        """Return the settings for `tracer`, and the environment variables of its process.

        Args:
            model: location of the model.
            device: the hardware that the engine runs on.
            arguments: arguments of a deployment's engine.
        """

    def tracer(self, settings: dict[str, Any], port: int) -> Tracer:
        """Start an engine for calibration.

        Args:
            settings: see `tracing`.
            port: first port at which its ranks may listen.
        """
