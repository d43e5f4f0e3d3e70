"""`serve run deployments/<topology>.yaml` ends here: configuration in, application graph out."""

from __future__ import annotations

import eldr_serve.engine.vllm.imports  # noqa: F401

import copy
import hashlib
import os
from typing import Any, Literal

from pydantic import ValidationError
from ray import serve
from ray.serve.deployment import Application
from ray.serve.llm import LLMConfig, build_llm_deployment

from eldr_serve.engine.vllm.compat.serve_llm import (
    LocalModel,
    OneProcessLLMConfig,
    check_ray,
    to_model_metadata,
)
from eldr_serve.engine.vllm.config import ENVIRONMENT, ONE_PROCESS, engine_kwargs
from eldr_serve.engine.vllm.requests import REQUESTS
from eldr_serve.errors import ConfigurationError
from eldr_serve.home import model_folder
from eldr_serve.serving.budget import SAMPLE_PERIOD_S
from eldr_serve.serving.config import DRAIN_S, SCALING, EldrArgs
from eldr_serve.serving.decode_router import actor_name
from eldr_serve.serving.ingress import EldrIngress, application, decode_directory, prefill_directory
from eldr_serve.serving.llm_servers import LLMDecodeServer, LLMPrefillServer
from eldr_serve.serving.openapi import openapi_document

_ROUTER = "eldr_serve.serving.request_router.DirectoryRouter"
EngineRole = Literal["prefill", "decode", "whole"]
_CONFIG = {"prefill": "prefill_config", "decode": "decode_config", "whole": "decode_config"}
# NIXL side channels; replicas add their rank
_PORT_BASE = {"prefill": 20000, "decode": 22000, "whole": 22000}


def build_app(args: dict[str, Any]) -> Application:
    """Build the Ray Serve application: ingress -> prefill deployment, if there is one, and decode deployment.

    Args:
        args: see EldrArgs.

    Raises:
        ConfigurationError: one sentence on what is wrong with `args`.
    """
    check_ray()
    parsed = parse(args)
    *prefill_config, decode_config = engine_configs(parsed).values()
    model_id = decode_config.model_id
    prefill = [
        build_llm_deployment(config, name_prefix="Prefill:", deployment_cls=LLMPrefillServer)
        for config in prefill_config
    ]
    decode = build_llm_deployment(
        decode_config,
        name_prefix="Decode:",
        deployment_cls=LLMDecodeServer,
        bind_kwargs={"router_name": actor_name(parsed.name)},
    )
    loading = decode_config.model_loading_config
    options = {"max_ongoing_requests": 2 * parsed.ingress.max_in_flight} | parsed.ingress_deployment_config
    ingress = serve.deployment(serve.ingress(application)(EldrIngress), name="EldrIngress", **options)
    return ingress.bind(
        prefill=next(iter(prefill), None),
        decode=decode,
        tokenizer=str(loading.tokenizer_source or loading.model_source or model_id),
        model_card=to_model_metadata(model_id, decode_config).model_dump(),
        openapi=openapi_document(REQUESTS),
        application=parsed.name,
        router=parsed.router.model_copy(update={"model_id": model_id}),
        options=parsed.ingress,
        path_options=parsed.path,
        max_load_ratio=parsed.prefill_router.max_load_ratio,
        max_kv_usage=parsed.prefill_router.max_kv_usage,
        admin_key_sha256=_admin_key_sha256(parsed),
    )


def parse(args: dict[str, Any]) -> EldrArgs:
    """The `args` of an application; raises ConfigurationError."""
    try:
        return EldrArgs.model_validate(args)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "args"
        raise ConfigurationError(f"{where}: {first['msg']}") from error


def engine_configs(parsed: EldrArgs) -> dict[EngineRole, LLMConfig]:
    """Of the engines that requests come to, in this order; raises ConfigurationError."""
    kv_lease_s = parsed.path.kv_lease_s
    decode_name = decode_directory(parsed.name)
    if parsed.prefill_config is None:
        whole = llm_config(parsed.decode_config, "whole", directory_name=decode_name, kv_lease_s=kv_lease_s)
        return {"whole": whole}
    prefill = llm_config(
        parsed.prefill_config,
        "prefill",
        directory_name=prefill_directory(parsed.name),
        kv_lease_s=kv_lease_s,
    )
    decode = llm_config(parsed.decode_config, "decode", directory_name=decode_name, kv_lease_s=kv_lease_s)
    if prefill.model_id != decode.model_id:
        raise ConfigurationError(
            f"prefill_config is for model {prefill.model_id!r}, decode_config for {decode.model_id!r}"
        )
    return {"prefill": prefill, "decode": decode}


def llm_config(
    given: dict[str, Any],
    role: EngineRole,
    *,
    directory_name: str,
    kv_lease_s: float,
) -> LLMConfig:
    """Ray's LLMConfig with the ELDR connector, scheduler and request router filled in."""
    config = copy.deepcopy(given)
    loading = config.get("model_loading_config") or {}
    source = loading.get("model_source")
    if isinstance(source, str) and (folder := model_folder(source)):
        loading["model_source"] = folder  # absolute: replicas run elsewhere
        config.setdefault("callback_config", {"callback_class": LocalModel})
    accelerator = (config.get("accelerator_config") or {}).get("kind", "gpu")
    config["engine_kwargs"] = engine_kwargs(
        role, device=accelerator, kv_lease_s=kv_lease_s, **(config.get("engine_kwargs") or {})
    )
    # Serve LLM gathers streamed tokens for 50 ms by default; inter-token latency would hide in it.
    experimental = {"stream_batching_interval_ms": 0, "NIXL_SIDE_CHANNEL_PORT_BASE": _PORT_BASE[role]}
    config["experimental_configs"] = experimental | (config.get("experimental_configs") or {})
    deployment = config.setdefault("deployment_config", {})
    deployment.setdefault("graceful_shutdown_timeout_s", DRAIN_S)
    if deployment.get("autoscaling_config"):
        deployment["autoscaling_config"].setdefault("policy", {"policy_function": SCALING})
    request_router = {"request_routing_stats_period_s": SAMPLE_PERIOD_S}
    deployment["request_router_config"] = (
        request_router
        | deployment.get("request_router_config", {})
        | {"request_router_class": _ROUTER, "request_router_kwargs": {"directory_name": directory_name}}
    )
    kind = LLMConfig
    environment = config.setdefault("runtime_env", {}).setdefault("env_vars", {})
    for variable, value in ENVIRONMENT.items():
        environment.setdefault(variable, value)
    if accelerator == "cpu" and _alone(config["engine_kwargs"]):
        kind = OneProcessLLMConfig
        environment.update(ONE_PROCESS | environment)
    try:
        return kind.model_validate(config)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise ConfigurationError(f"{_CONFIG[role]}.{where}: {first['msg']}") from error


def _alone(kwargs: dict[str, Any]) -> bool:
    """Whether the engine has one rank, and nobody asked for an executor."""
    ranks = kwargs.get("tensor_parallel_size", 1) * kwargs.get("pipeline_parallel_size", 1)
    return bool(ranks == 1 and "distributed_executor_backend" not in kwargs)


def _admin_key_sha256(args: EldrArgs) -> str | None:
    key = args.admin_key.get_secret_value() if args.admin_key else os.environ.get("ELDR_ADMIN_KEY")
    return hashlib.sha256(key.encode()).hexdigest() if key else None
