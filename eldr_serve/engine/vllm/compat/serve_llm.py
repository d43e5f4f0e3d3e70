"""The internal names of Ray Serve LLM, and of vLLM's endpoints, that a replica and its deployment use.

Checked on Ray 2.60.0 and vLLM 0.32.0.
"""

from __future__ import annotations

import eldr_serve.engine.vllm.imports  # noqa: F401

import copy
import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, TypeVar

import ray
import vllm
from pydantic import ValidationError
from ray.serve.llm import LLMConfig
from ray.serve.llm.deployment import LLMServer

from eldr_serve.engine.vllm.compat.checked import SUPPORTED_VLLM, check_uses_attributes, internal_imports
from eldr_serve.engine.vllm.compat.messages import SERVING_NAMES, AnthropicCountTokensRequest
from eldr_serve.engine.vllm.ranks import data_ranks
from eldr_serve.errors import RequestRefusedError

with internal_imports():
    from vllm.entrypoints.generate.api_router import init_generate_state
    from vllm.entrypoints.launchers.api_server.app_state import init_app_state
    from vllm.entrypoints.openai.models.protocol import LoRAModulePath
    from vllm.entrypoints.pooling.factories import init_pooling_state
    from vllm.entrypoints.pooling.scoring.protocol import RerankRequest
    from vllm.entrypoints.serve import create_error_response
    from vllm.entrypoints.serve.exception_handling.handlers.validation import clean_loc_for_param
    from vllm.entrypoints.serve.tokenize.protocol import DetokenizeRequest, TokenizeRequest
    from vllm.exceptions import VLLMValidationError
    from vllm.v1.engine import EngineCoreOutput, FinishReason
    from vllm.v1.engine.output_processor import OutputProcessor
    from vllm.v1.outputs import LogprobsLists

_CHECKED = "2.60"
_Client = TypeVar("_Client")
try:
    from ray._common.usage.usage_lib import usage_stats_enabled
    from ray.llm._internal.common.callbacks.base import CallbackBase
    from ray.llm._internal.serve.core.configs.accelerators import GPUAccelerator
    from ray.llm._internal.serve.core.configs.openai_api_models import (
        ChatCompletionRequest,
        CompletionRequest,
        EmbeddingRequest,
        ScoreRequest,
        to_model_metadata,
    )
    from ray.llm._internal.serve.core.ingress.utils import _sanitize_chat_completion_request as picklable_chat
    from ray.llm._internal.serve.core.protocol import RawRequestInfo
    from ray.llm._internal.serve.core.server.builder import _get_deployment_name as deployment_name
    from ray.llm._internal.serve.engines.vllm.kv_transfer.factory import KVConnectorBackendFactory
    from ray.llm._internal.serve.engines.vllm.kv_transfer.nixl import NixlConnectorBackend
    from ray.llm._internal.serve.engines.vllm.vllm_engine import (
        _canonicalize_request_id_header as canonical_request_id,
    )
    from ray.llm._internal.serve.engines.vllm.vllm_models import VLLMEngineConfig
except ImportError as error:
    raise ImportError(
        f"ray {ray.__version__} lacks a name that eldr-serve extends ({error}); "
        f"it was checked on ray {_CHECKED}"
    ) from error

# Ray's public request classes are subclasses of these, which the endpoints and engines use.
__all__ = [
    "ENDPOINT_REQUESTS",
    "ChatCompletionRequest",
    "CompletionRequest",
    "EngineCoreOutput",
    "FinishReason",
    "LoRAModulePath",
    "LocalModel",
    "LogprobsLists",
    "OneProcessLLMConfig",
    "OutputProcessor",
    "QuietLLMServer",
    "RawRequestInfo",
    "canonical_request_id",
    "check_ray",
    "create_error_response",
    "deployment_name",
    "deployment_options",
    "engine_client",
    "engine_placement",
    "openai_serving",
    "parameter_of",
    "picklable_chat",
    "register_connector",
    "rerank",
    "to_model_metadata",
    "wrap_client",
    "wrap_stream",
]

# Request types of the endpoints that generate nothing, by the method of LLMServer.
ENDPOINT_REQUESTS: dict[str, Any] = {
    "embeddings": EmbeddingRequest,
    "score": ScoreRequest,
    "rerank": RerankRequest,
    "count_tokens": AnthropicCountTokensRequest,
    "tokenize": TokenizeRequest,
    "detokenize": DetokenizeRequest,
}


class LocalModel(CallbackBase):
    """Start-up callback of an engine whose model is already on its node: skip the download.

    Ray would look for files to download in a separate task, whose process imports vLLM.
    """

    async def on_before_node_init(self) -> None:
        """Skip Ray's initialization of the node."""
        self.ctx.run_init_node = False


class QuietLLMServer(LLMServer):
    """An LLMServer that starts no telemetry actor if Ray's usage statistics are disabled.

    Ray's class would start one anyway, in a process that imports vLLM, and wait for it.
    """

    async def _start_engine(self) -> None:
        if usage_stats_enabled():
            await super()._start_engine()
        else:
            await self.engine.start()


class _OwnGpus(GPUAccelerator):
    """The GPUs of a replica that runs its engine itself.

    For other GPU engines, Ray makes the configuration in a task that needs one more GPU than the replica. A
    node whose GPUs all belong to the replica has none left.
    """

    @property
    def requires_remote_initialization(self) -> bool:
        """Return False: this replica has GPUs."""
        return False


class _OneProcess(VLLMEngineConfig):
    @property
    def accelerator(self) -> Any:
        """Return Ray's description of the hardware; GPUs are the replica's own."""
        accelerator: Any = super().accelerator
        return _OwnGpus() if isinstance(accelerator, GPUAccelerator) else accelerator

    def get_initialization_kwargs(self) -> dict[str, Any]:
        kwargs: dict[str, Any] = super().get_initialization_kwargs()
        return kwargs | {"distributed_executor_backend": "uni"}

    @property
    def num_devices(self) -> int:
        """Return the number of ranks. Ray omits data-parallel ranks, so replicas would share ports."""
        devices: int = super().num_devices
        return devices * data_ranks(self.engine_kwargs)


class OneProcessLLMConfig(LLMConfig):
    """An LLMConfig of an engine whose scheduler and model run in one process for each data-parallel rank.

    Ray gives every CPU engine vLLM's multiprocess executor, whatever its arguments say. With this executor,
    scheduler and worker wait for each other by spinning, which takes a core for each engine under load. The
    additional process takes 0.8 GB. Ray gives every GPU engine its own executor, whose worker is a
    separate actor.
    """

    def get_engine_config(self) -> VLLMEngineConfig:
        """Return Ray's engine configuration with vLLM's executor for one process."""
        config = super().get_engine_config()
        if not isinstance(config, _OneProcess):
            config = self._engine_config = _OneProcess(**dict(config))
        return config


def register_connector() -> None:
    """Make Ray assign ports and an engine id to EldrConnector as to NixlConnector; safe to call again.

    Ray does so only for registered connectors.
    """
    try:
        KVConnectorBackendFactory.register_backend("EldrConnector", NixlConnectorBackend)
    except ValueError:  # it was registered before, perhaps by another replica at the same time
        if not KVConnectorBackendFactory.is_registered("EldrConnector"):
            raise


# Method -> attribute of vLLM's application state with the serving object, and that object's method.
_SERVING = {
    "chat": ("openai_serving_chat", "create_chat_completion"),
    "completions": ("openai_serving_completion", "create_completion"),
    "messages": ("anthropic_serving_messages", "create_chat_completion"),
    "count_tokens": ("anthropic_serving_messages", "count_tokens"),
    "responses": ("openai_serving_responses", "create_responses"),
    "tokenize": ("serving_tokenization", "create_tokenize"),
    "detokenize": ("serving_tokenization", "create_detokenize"),
}


# Method -> generator of the serving object's streams.
_STREAMS = {"chat": "chat_completion_stream_generator", "completions": "completion_stream_generator"}


def openai_serving(engine: Any, method: str) -> tuple[Any, str]:
    """Return vLLM's serving object for a method of Ray's VLLMEngine, and the name of the object's method.

    The object is read from vLLM's application state, because Ray looks up some attributes by names that vLLM
    does not have (`openai_serving_tokenization`).

    Raises:
        RuntimeError: the object is not where the checked version has it.
    """
    attribute, create = _SERVING[method]
    serving = getattr(getattr(engine, "_app_state", None), attribute, None)
    _require(serving, attribute, create)
    return serving, create


def _require(serving: Any, attribute: str, *names: str) -> None:
    for name in names:
        if not hasattr(serving, name):
            raise RuntimeError(
                f"ray {ray.__version__} with vLLM {vllm.__version__} has no "
                f"VLLMEngine._app_state.{attribute}.{name}, which eldr-serve uses; it was checked on "
                f"ray {_CHECKED} with vLLM {SUPPORTED_VLLM}"
            )


async def rerank(engine: Any, request: Any, raw_request: Any) -> bytes:
    """Return vLLM's answer to a RerankRequest as JSON; Ray's server has no such endpoint.

    Raises:
        RequestRefusedError: the model cannot score.
    """
    serving = getattr(getattr(engine, "_app_state", None), "serving_scores", None)
    if serving is None:
        raise RequestRefusedError(
            "this model does not support the 'score' task, which the rerank endpoint needs", status=400
        )
    body: bytes = (await serving(request, raw_request)).body
    return body


def wrap_client(serving: Any, wrap: Callable[[Any], _Client]) -> tuple[Any, _Client]:
    """Copy a serving object and wrap the engine client of the copy.

    Returns:
        The copy, and its client `wrap(client)`.
    """
    serving = copy.copy(serving)
    serving.engine_client = client = wrap(serving.engine_client)
    return serving, client


def wrap_stream(serving: Any, method: str, wrap: Callable[[Any], Any]) -> None:
    """Replace the generator of a serving object's streams by `wrap(generator)`."""
    name = _STREAMS[method]
    setattr(serving, name, wrap(getattr(serving, name)))


def check_serving(engine: Any) -> None:
    """Raise an error unless vLLM has all serving objects where they are expected, with the names used here.

    Ray itself calls the objects for embeddings and scores. An engine that generates text does not have these
    objects. The names that Ray reads are therefore looked up in the vLLM function that would set them.

    Raises:
        RuntimeError: a serving object is missing.
        UnsupportedEngineError: vLLM sets no attribute of that name.
    """
    for method in _SERVING:
        serving, _ = openai_serving(engine, method)
        if method in _STREAMS:
            _require(serving, _SERVING[method][0], "engine_client", _STREAMS[method])
        if method in ("messages", "responses"):
            names = SERVING_NAMES if method == "messages" else ()
            _require(serving, _SERVING[method][0], "engine_client", *names)
    check_uses_attributes(init_app_state, "openai_serving_models", "serving_tokenization")
    check_uses_attributes(
        init_generate_state,
        "openai_serving_chat",
        "openai_serving_completion",
        "anthropic_serving_messages",
        "openai_serving_responses",
    )
    check_uses_attributes(init_pooling_state, "serving_embedding", "serving_scores")


def engine_placement(config: LLMConfig) -> tuple[list[dict[str, float]], str]:
    """Return the bundles and the strategy of the placement group that Ray creates for each engine replica."""
    options = deployment_options(config)
    return options["placement_group_bundles"], options["placement_group_strategy"]


def deployment_options(config: LLMConfig) -> dict[str, Any]:
    """Return the options of an engine deployment, as LLMServer computes them.

    They contain the runtime environment of the process that builds the application. If Ray is not running,
    the environment is left out; LLMServer would start Ray to ask for it.
    """
    if ray.is_initialized():
        options: dict[str, Any] = LLMServer.get_deployment_options(config)
        return options
    get_runtime_context = ray.get_runtime_context
    ray.get_runtime_context = lambda: SimpleNamespace(runtime_env={})
    try:
        return dict(LLMServer.get_deployment_options(config))
    finally:
        ray.get_runtime_context = get_runtime_context


def parameter_of(error: Exception) -> str | None:
    """Return the field that vLLM's server reports as `param` of this error; None if there is none."""
    parameter: str | None = None
    if isinstance(error, VLLMValidationError):
        parameter = error.parameter
    elif isinstance(error, ValidationError):
        causes = [details.get("ctx", {}).get("error") for details in error.errors()]
        parameters = [cause.parameter for cause in causes if isinstance(cause, VLLMValidationError)]
        parameter = next(filter(None, parameters), None)
        if parameter is None:
            parameter = clean_loc_for_param(("body", *error.errors()[0]["loc"]))
    return parameter


def engine_client(engine: Any) -> Any:
    """Return vLLM's client of its engine core from Ray's VLLMEngine."""
    return engine._engine_client


def check_ray() -> None:
    """Raise RuntimeError if Ray lacks an internal name that this package extends."""
    engine = hasattr(VLLMEngineConfig, "get_initialization_kwargs") and (
        hasattr(LLMConfig, "get_engine_config") and "_engine_config" in LLMConfig.__private_attributes__
    )
    starts = inspect.iscoroutinefunction(getattr(LLMServer, "_start_engine", None))
    for exists, what in (
        (starts, "LLMServer._start_engine()"),
        (engine, "LLMConfig.get_engine_config with VLLMEngineConfig.get_initialization_kwargs"),
        (
            "requires_remote_initialization" in vars(GPUAccelerator),
            "GPUAccelerator.requires_remote_initialization",
        ),
    ):
        if not exists:
            raise RuntimeError(
                f"ray {ray.__version__} has no {what}, which eldr-serve extends; "
                f"it was checked on ray {_CHECKED}"
            )
