"""The engine arguments that load eldr_serve's extension into a vLLM engine.

They are used where a deployment is built, and by calibration, tests and benchmarks.
"""

from __future__ import annotations

import logging
from typing import Any, Literal

from eldr_serve.errors import ConfigurationError
from eldr_serve.validation import unknown_name

Role = Literal["prefill", "decode", "whole", "calibrate"]
_KV_ROLE = {"prefill": "kv_producer", "decode": "kv_consumer", "whole": "kv_both", "calibrate": "kv_both"}
# Environment of an engine's processes. NIXL transfers the states of recurrent layers (GDN, Mamba) only in
# this layout, which vLLM on CPUs selects only for its own connector.
ENVIRONMENT = {"VLLM_SSM_CONV_STATE_LAYOUT": "DS"}
# Additional environment of an engine that runs scheduler and model in one process; without it vLLM's CPU
# platform separates them.
ONE_PROCESS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
# Methods of speculative decoding that vLLM does not schedule asynchronously.
_SYNCHRONOUS = ("ngram", "suffix", "medusa", "mlp_speculator")
# Methods whose drafter has no KV cache.
_NO_DRAFT_KV = (*_SYNCHRONOUS, "ngram_gpu")
# Tracing arguments. vLLM derives spans from its statistics; without these the first request fails.
_SPANS = ("otlp_traces_endpoint", "collect_detailed_traces")

CONFIG_KEY = "eldr_experts"  # key of additional_config; see experts_config.py
_LEASE = "kv_lease_duration"  # name of NIXL's argument for `kv_lease_s`

logger = logging.getLogger(__name__)


def engine_kwargs(
    role: Role, *, device: str = "gpu", kv_lease_s: float = 30.0, **overrides: Any
) -> dict[str, Any]:
    """Return arguments for AsyncEngineArgs, LLM or Ray Serve LLM's `engine_kwargs`.

    Args:
        role: role of the engine; an engine of a whole replica both prefills and decodes.
        device: "cpu" or "gpu", the location of the KV cache.
        kv_lease_s: seconds for which a prefill engine keeps a finished prompt's blocks.
        overrides: further engine arguments, which replace the default ones. Exceptions: the keys of
            `kv_transfer_config` and its `kv_connector_extra_config` are merged into the default ones.
            `speculative_config` applies to engines that decode; a prefill engine keeps it if the drafter has
            a KV cache, since NIXL needs equal caches on both sides. A calibrating engine emits no spans,
            since its prompts are not requests of clients. `disable_log_stats` causes a warning, except on a
            calibrating engine.

    Raises:
        ValueError: an unknown role.
        ConfigurationError: the overrides enable spans and disable the statistics that spans need, or set
            the lease of KV blocks, which `kv_lease_s` sets.
    """
    if role not in _KV_ROLE:
        raise ValueError(unknown_name("", role, _KV_ROLE, "engine role"))
    drafting = overrides.get("speculative_config") or {}
    method = drafting.get("method")
    if drafting and (role == "calibrate" or (role == "prefill" and method in _NO_DRAFT_KV)):
        logger.warning("speculative decoding is off on the %s engine, which verifies no drafts", role)
        del overrides["speculative_config"]
        method = None
    if role == "calibrate":
        overrides = {name: value for name, value in overrides.items() if name not in _SPANS}
    elif overrides.get("otlp_traces_endpoint") and overrides.get("disable_log_stats"):
        raise ConfigurationError(
            "engine_kwargs has otlp_traces_endpoint and disable_log_stats; vLLM makes its spans from "
            "statistics, which disable_log_stats switches off: leave one of the two out"
        )
    elif overrides.get("disable_log_stats"):
        logger.warning("the %s engine has disable_log_stats: its steps and KV usage are unknown", role)
    asynchronous = overrides.get("async_scheduling", role != "calibrate" and method not in _SYNCHRONOUS)
    defaults: dict[str, Any] = {
        "scheduler_cls": f"eldr_serve.engine.vllm.scheduler.Eldr{'Async' if asynchronous else ''}Scheduler",
        "worker_extension_cls": "eldr_serve.engine.vllm.worker.EldrWorkerExtension",
        "async_scheduling": asynchronous,
        "enable_prefix_caching": True,
    }
    if device == "cpu":
        defaults |= {"enforce_eager": True, "block_size": 32}
        if overrides.get("enable_lora"):
            defaults["worker_cls"] = "eldr_serve.engine.vllm.cpu_worker.EldrCpuWorker"
    elif CONFIG_KEY in (overrides.get("additional_config") or {}):
        defaults["worker_cls"] = "eldr_serve.engine.vllm.eplb.PlacedWorker"
    else:
        defaults["worker_cls"] = "eldr_serve.engine.vllm.gpu_worker.EldrWorker"
    transfer = _transfer(role, device, kv_lease_s, overrides.pop("kv_transfer_config", None) or {})
    return defaults | overrides | {"kv_transfer_config": transfer}


def _transfer(role: Role, device: str, kv_lease_s: float, overrides: dict[str, Any]) -> dict[str, Any]:
    """Return vLLM's `kv_transfer_config`; raise ConfigurationError if the overrides set the lease."""
    transfer: dict[str, Any] = {
        "kv_connector": "EldrConnector",
        "kv_connector_module_path": "eldr_serve.engine.vllm.kv.connector",
        "kv_role": _KV_ROLE[role],
        "kv_buffer_device": "cpu" if device == "cpu" else "cuda",
        **overrides,
    }
    extra = transfer.get("kv_connector_extra_config") or {}
    if _LEASE in extra:
        raise ConfigurationError(
            f"engine_kwargs.kv_transfer_config.kv_connector_extra_config.{_LEASE} is {extra[_LEASE]!r}: set "
            "path.kv_lease_s instead, since time limits of the service depend on it"
        )
    return transfer | {"kv_connector_extra_config": {**extra, _LEASE: int(kv_lease_s)}}
