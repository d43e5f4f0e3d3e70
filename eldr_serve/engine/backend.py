"""What a kind of engine is built from, checked with and calibrated by; `chosen` says which kind runs.

A backend is light to import: what its engines need is imported by what needs it, or by `load`.
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
    """What the largest step of one rank is made of.

    Attributes:
        tokens: `max_num_batched_tokens`.
        sequences: `max_num_seqs`.
        hidden: hidden size.
        top_k: experts a token.
        expert_width: an expert's intermediate size on this rank.
        vocabulary: tokens in it.
        element: bytes of an activation.
    """

    tokens: int
    sequences: int
    hidden: int
    top_k: int
    expert_width: int
    vocabulary: int
    element: int


class EngineSpec(Protocol):
    """The engines of one role, as a deployment's `prefill_config` or `decode_config` describes them."""

    @property
    def model_id(self) -> str:
        """The name that requests carry."""

    @property
    def model_source(self) -> str:
        """Where the model is: a folder, an address, or a name on the model hub."""

    @property
    def tokenizer(self) -> str:
        """Where its tokenizer is, likewise."""

    @property
    def model_card(self) -> dict[str, Any]:
        """What `GET /v1/models` says of it."""

    @property
    def deployment_config(self) -> dict[str, Any]:
        """Options of the Ray Serve deployment."""

    @property
    def device(self) -> Device:
        """What the engines run on."""

    @property
    def ranks(self) -> int:
        """Processes, and GPUs, of one engine."""

    @property
    def environment(self) -> dict[str, str]:
        """Of its processes, as far as the file says."""

    @property
    def host_kv_gib(self) -> float | None:
        """KV cache of an engine on a CPU, GiB; None if nobody says."""

    @property
    def fixed_port(self) -> str:
        """The environment variable that would give all replicas one NIXL port."""

    @property
    def host_kv_variable(self) -> str:
        """Return the environment variable that sets the size of a KV cache on a CPU."""

    @property
    def deployment_name(self) -> str:
        """Return the name of the Ray Serve deployment, without the prefix."""

    def ports(self, replicas: int) -> list[int]:
        """NIXL's side channel of each replica, by its rank; one port an engine."""

    def placement(self) -> tuple[list[dict[str, float]], str]:
        """Bundles and strategy of the placement group of one replica."""

    def arguments(self) -> dict[str, Any]:
        """Of one engine, for `Backend.describe`; JSON types."""

    def deployment(self, server: type, *, name_prefix: str, **arguments: Any) -> Application:
        """Build the Ray Serve deployment of these engines. Ray need not be running.

        Args:
            server: class of a replica; it is called with `llm_config`, the argument of `Backend.start`.
            name_prefix: prefix of the deployment's name, before the model's name.
            arguments: further arguments of the class.
        """


class Described(Protocol):
    """An engine on a described machine, of which nothing is computed. Bytes are those of one rank."""

    max_model_len: int  # tokens of a prompt and its answer, at most
    memory_utilization: float  # share of a GPU's memory that the engine may take
    agreed: Mapping[str, Any]  # resolved arguments that prefill and decode must share; JSON types

    def weight_bytes(self) -> int:
        """Of the parameters."""

    def kernels(self) -> set[tuple[str, bool]]:
        """(name of the MoE kernel, whether it hides the experts that it chooses) of all MoE layers."""

    def step(self) -> Step:
        """The largest."""

    def check(self) -> None:
        """Raise ConfigurationError where an engine with expert counts would not start."""

    def kv_cache(self, available: int) -> tuple[int, float]:
        """(KV tokens, sequences of max_model_len at the same time) in so many bytes.

        Raises:
            ValueError: there is no room for one sequence.
        """


class Backend(Protocol):
    """A kind of engine."""

    describing: Mapping[str, str]  # environment of a process that calls `describe`

    def load(self) -> None:
        """Import what its engines need: to be called before anything else that may import it."""

    def check(self) -> None:
        """Raise RuntimeError, one sentence, if what is installed is not what it was made for."""

    def version(self) -> str:
        """Return the version of the engine software."""

    def requests(self) -> Mapping[str, Any]:
        """Types of clients' requests, by method (see EngineRequest)."""

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
            config: the role's configuration; it is modified.
            kv_lease_s: how long a prefill engine keeps a finished prompt's blocks, s.

        Raises:
            ValueError, TypeError: the configuration cannot be used; a ValidationError has the location.
        """

    async def start(self, config: Any) -> Engine:
        """Start the engine of a replica."""

    def deployment_options(self, config: Any) -> dict[str, Any]:
        """Options of the Ray Serve deployment, with the resources that a replica takes."""

    def describe(
        self, model: Path, arguments: dict[str, Any], memory_gib: float, capability: tuple[int, int] | None
    ) -> Described:
        """An engine as it would be on some machine.

        Args:
            model: folder with its config.json.
            arguments: see EngineSpec.arguments.
            memory_gib: of its GPU.
            capability: its GPU's of CUDA; None: it runs on a CPU.

        Raises:
            ValueError, NotImplementedError, AssertionError: it would not start.
        """

    def tracing(
        self, model: str, device: Device, arguments: dict[str, Any]
    ) -> tuple[dict[str, Any], dict[str, str]]:
        """What `tracer` takes, and the environment of its process.

        Args:
            model: where it is.
            arguments: of a deployment's engine.
        """

    def tracer(self, settings: dict[str, Any], port: int) -> Tracer:
        """Start an engine for calibration.

        Args:
            port: the first of those that its ranks may listen at.
        """
