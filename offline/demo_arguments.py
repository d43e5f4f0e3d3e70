"""The arguments of the application that the demo serves: those of a deployment file, adapted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

_NO_REFIT_S = 86400.0  # no refit during the comparison, so that all policies use the same table
_KV_BYTES = 256 << 20  # KV cache of an engine, enough for about 50 requests of the demo model
_ROLES = ("prefill_config", "decode_config")
_GPU_SHARE = 0.9  # share of one GPU that all its engines together request from Ray


def demo_arguments(
    deployment: Path, model: Path, decode: int, first_table: int, *, gpu: bool = False
) -> dict[str, Any]:
    """Return the application arguments of a deployment file, adapted to the demo's model.

    Args:
        deployment: YAML file.
        model: folder of the weights.
        decode: number of decode engines, each with a small KV cache so that they fit in memory; 0: all as
            deployed.
        first_table: number of requests for the routing table, which is not refitted later, whatever the file
            says.
        gpu: whether all engines share one GPU, see `move_to_one_gpu`.
    """
    arguments: dict[str, Any] = yaml.safe_load(deployment.read_text())["applications"][0]["args"]
    demo_signatures = {"first_table": first_table, "every_s": _NO_REFIT_S}
    arguments["signatures"] = arguments.get("signatures", {}) | demo_signatures
    for role in _ROLES:
        config = arguments[role]
        config["model_loading_config"]["model_source"] = str(model)
        if decode:
            config["runtime_env"]["env_vars"].pop("VLLM_CPU_KVCACHE_SPACE", None)
            # Send several tokens at a time: on shared cores each message to a client delays the engines.
            config["engine_kwargs"] |= {"kv_cache_memory_bytes": _KV_BYTES, "stream_interval": 8}
    if decode:
        arguments["decode_config"]["deployment_config"]["num_replicas"] = decode
    if gpu:
        move_to_one_gpu(arguments)
    return arguments


def move_to_one_gpu(arguments: dict[str, Any]) -> None:
    """Move the engines of a deployment for CPUs to one GPU, which they share evenly.

    Each engine is one process with bf16 weights. Its decode steps run in CUDA graphs unless its arguments set
    `enforce_eager`, and inductor compiles nothing.
    """
    configs = [arguments[role] for role in _ROLES]
    engines = sum(config["deployment_config"].get("num_replicas", 1) for config in configs)
    share = round(_GPU_SHARE / engines, 3)
    for config in configs:
        config["accelerator_config"] = {"kind": "gpu"}
        config["placement_group_config"] = {"bundles": [{"CPU": 0.1}]}
        config["deployment_config"].setdefault("ray_actor_options", {})["num_gpus"] = share
        config["engine_kwargs"] |= {
            "dtype": "bfloat16",
            "gpu_memory_utilization": share,
            "attention_backend": "TRITON_ATTN",
            "compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"},
            "distributed_executor_backend": "uni",
        }
        environment = config["runtime_env"]["env_vars"]
        for name in [name for name in environment if name.startswith("VLLM_CPU_")]:
            del environment[name]
