"""The check, made by each connector, that an engine's configuration permits exact expert counts."""

from __future__ import annotations

from typing import Any

import vllm
from vllm.config import VllmConfig

from eldr_serve.engine.vllm.compat.checked import (
    check_names,
    check_version,
    internal_imports,
    raise_first_refusal,
)

with internal_imports():
    from eldr_serve.engine.vllm.compat import kv_cache, moe, nixl


def check_engine(vllm_config: VllmConfig, device: str) -> None:
    """Raise UnsupportedEngineError if the expert counts of this engine would not be exact."""
    check_version()
    for part in (kv_cache, moe, nixl):
        part.check_vllm_names()
    check_names("the ELDR connector", (VllmConfig, "use_v2_model_runner"))
    parallel = vllm_config.parallel_config
    raise_first_refusal(
        "the ELDR connector",
        (
            parallel.pipeline_parallel_size > 1,
            "pipeline parallelism, where a stage sees only its own layers: set pipeline_parallel_size to 1",
        ),
        *_find_data_parallel_refusals(vllm_config, device),
        (
            parallel.decode_context_parallel_size > 1,
            "decode context parallelism, which spreads a block's tokens: "
            "set decode_context_parallel_size to 1",
        ),
        (
            parallel.prefill_context_parallel_size > 1,
            "prefill context parallelism, where a rank sees a part of a prompt: "
            "set prefill_context_parallel_size to 1",
        ),
        (
            vllm_config.speculative_config is not None
            and vllm_config.kv_transfer_config.kv_role not in ("kv_consumer", "kv_producer"),
            "speculative decoding in an engine that prefills and decodes, where rejected tokens would be "
            "counted: leave speculative_config out",
        ),
        (
            parallel.enable_dbo,
            "dual-batch overlap, where a step's tokens pass the gates in two parts: set enable_dbo to false",
        ),
        (
            vllm_config.aux_output_config.enable_return_routed_experts,
            "enable_return_routed_experts, since vLLM's own capture would replace this one: leave it out",
        ),
    )


def _find_data_parallel_refusals(vllm_config: VllmConfig, device: str) -> list[tuple[bool, str]]:
    """Return the reasons to refuse an engine for its data-parallel ranks, see `raise_first_refusal`."""
    parallel = vllm_config.parallel_config
    ranks = parallel.data_parallel_size
    if ranks == 1:
        return []
    experts = vllm_config.model_config.get_num_experts() + parallel.eplb_config.num_redundant_experts
    refusals = [
        (
            not parallel.enable_expert_parallel,
            "data-parallel ranks with a share of each expert: set enable_expert_parallel to true, or "
            "data_parallel_size to 1 and run more replicas",
        ),
        (
            parallel.tensor_parallel_size > 1,
            "data-parallel ranks that are tensor-parallel too, where each routes only a part of its tokens: "
            "set tensor_parallel_size to 1",
        ),
        (
            parallel.data_parallel_external_lb or parallel.data_parallel_hybrid_lb,
            "data-parallel ranks in several replicas, since the router must know which ranks wait for each "
            "other: leave data_parallel_rank, data_parallel_external_lb and data_parallel_hybrid_lb out",
        ),
        (
            experts % ranks > 0,
            f"{experts} experts on {ranks} data-parallel ranks: set data_parallel_size to a number that "
            "divides them",
        ),
    ]
    return refusals if device == "cpu" else refusals + _find_gpu_refusals(parallel)


def _find_gpu_refusals(parallel: Any) -> list[tuple[bool, str]]:
    """Return the reasons to refuse data-parallel ranks that only engines on GPUs can have."""
    return [
        (
            parallel.data_parallel_size_local != parallel.data_parallel_size,
            "data-parallel ranks on several nodes: leave data_parallel_size_local and nnodes out, and run a "
            "replica on each node",
        ),
        (
            parallel.data_parallel_backend == "ray" or parallel.distributed_executor_backend == "ray",
            "data-parallel ranks as actors of Ray, which would not get the GPUs of their replica: leave "
            "data_parallel_backend and distributed_executor_backend out",
        ),
        (
            parallel.enable_elastic_ep,
            "elastic expert parallelism, where ranks come and go: set enable_elastic_ep to false",
        ),
    ]


def model_runner(vllm_config: VllmConfig) -> str:
    """Return vLLM's version and the model runner that the engine uses, for messages."""
    return f"vLLM {vllm.__version__}, Model Runner {'V2' if vllm_config.use_v2_model_runner else 'V1'}"
