"""Engine arguments that make a vLLM engine one of ours."""

from __future__ import annotations

import logging
from typing import Any, Literal

from eldr_serve.errors import ConfigurationError

Role = Literal["prefill", "decode", "whole", "calibrate"]
_KV_ROLE = {"prefill": "kv_producer", "decode": "kv_consumer", "whole": "kv_both", "calibrate": "kv_both"}
# Of an engine's process. NIXL moves the states of recurrent layers (GDN, Mamba) in this layout alone, and
# vLLM chooses it by itself for no connector but its own, on CPUs.
ENVIRONMENT = {"VLLM_SSM_CONV_STATE_LAYOUT": "DS"}
# The same, of an engine whose scheduler and model run in one process: else vLLM's platform undoes it.
ONE_PROCESS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
# Methods of speculative decoding that vLLM does not schedule asynchronously, and with the last those
# whose drafter has no KV cache.
_SYNCHRONOUS = ("ngram", "suffix", "medusa", "mlp_speculator")
_NO_DRAFT_KV = (*_SYNCHRONOUS, "ngram_gpu")
# vLLM makes spans of its statistics, and without them fails with the first request.
_SPANS = ("otlp_traces_endpoint", "collect_detailed_traces")

logger = logging.getLogger(__name__)


def engine_kwargs(
    role: Role, *, device: str = "gpu", kv_lease_s: float = 30.0, **overrides: Any
) -> dict[str, Any]:
    """Arguments for AsyncEngineArgs, LLM or Ray Serve LLM's `engine_kwargs`.

    Args:
        role: what the engine is for; a whole one prefills and decodes.
        device: "cpu" or "gpu", where the KV cache lies.
        kv_lease_s: how long a prefill engine keeps a finished prompt's blocks, s.
        overrides: any further engine arguments; they win, but for `kv_transfer_config`, whose keys
            are laid over ours, and `speculative_config`, which serves engines that decode. A prefill engine
            keeps it where the drafter has a KV cache, since NIXL wants that equal on both sides. A
            calibrating engine, whose prompts are no requests, makes no spans. `disable_log_stats` is
            warned of, but where an engine calibrates.

    Raises:
        ValueError: an unknown role.
        ConfigurationError: vLLM is asked for spans, and to keep no statistics.
    """
    if role not in _KV_ROLE:
        raise ValueError(f"unknown engine role {role!r}; there are {', '.join(_KV_ROLE)}")
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
            "engine_kwargs has otlp_traces_endpoint and disable_log_stats; vLLM makes its spans of the "
            "statistics that the second one switches off"
        )
    elif overrides.get("disable_log_stats"):
        logger.warning("the %s engine has disable_log_stats: its steps and KV use are not known", role)
    asynchronous = overrides.get("async_scheduling", role != "calibrate" and method not in _SYNCHRONOUS)
    transfer = {
        "kv_connector": "EldrConnector",
        "kv_connector_module_path": "eldr_serve.engine.vllm.connector",
        "kv_role": _KV_ROLE[role],
        "kv_buffer_device": "cpu" if device == "cpu" else "cuda",
        "kv_connector_extra_config": {"kv_lease_duration": int(kv_lease_s)},
    }
    defaults: dict[str, Any] = {
        "scheduler_cls": f"eldr_serve.engine.vllm.scheduler.Eldr{'Async' if asynchronous else ''}Scheduler",
        "worker_extension_cls": "eldr_serve.engine.vllm.worker.EldrWorkerExtension",
        "async_scheduling": asynchronous,
        "enable_prefix_caching": True,
    }
    if device == "cpu":
        defaults |= {"enforce_eager": True, "block_size": 32}
    else:
        defaults["worker_cls"] = "eldr_serve.engine.vllm.gpu_worker.EldrWorker"
    transfer |= overrides.pop("kv_transfer_config", {})
    return defaults | overrides | {"kv_transfer_config": transfer}
