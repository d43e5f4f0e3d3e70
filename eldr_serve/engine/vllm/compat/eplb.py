"""Placements of `eldr place` in vLLM's expert-parallel load balancer (EPLB), in its workers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from vllm.config import VllmConfig

from eldr_serve.engine.vllm.compat.checked import check_names, internal_imports, raise_first_refusal

with internal_imports():
    from vllm.distributed import get_ep_group
    from vllm.distributed.eplb.eplb_state import EplbLayerState, EplbModelState, EplbState
    from vllm.distributed.eplb.policy.abstract import AbstractEplbPolicy
    from vllm.distributed.parallel_state import get_node_count
    from vllm.model_executor.layers.fused_moe.router.base_router import BaseRouter

__all__ = [
    "AbstractEplbPolicy",
    "EplbModelState",
    "EplbState",
    "check_expert_placement",
    "get_ep_group",
    "get_node_count",
    "routes_own_tokens",
    "run_before_eplb_mapping",
]


def check_expert_placement(vllm_config: VllmConfig) -> None:
    """Raise UnsupportedEngineError if this engine does not support eldr_serve/engine/vllm/eplb.py."""
    check_names(
        "expert placement",
        (BaseRouter, "_apply_eplb_mapping"),
        (EplbState, "rearrange"),
        (EplbLayerState, "logical_to_physical_map"),
        (EplbLayerState, "logical_replica_count"),
    )
    parallel = vllm_config.parallel_config
    raise_first_refusal(
        "expert placement",
        (not parallel.enable_eplb, "an engine without enable_expert_parallel and enable_eplb"),
        (parallel.eplb_config.use_async, "asynchronous EPLB: set use_async to false"),
        (parallel.enable_elastic_ep, "elastic expert parallelism: ranks would come and go"),
        (parallel.enable_dbo, "dual-batch overlap: two batches would share one choice of replicas"),
        (
            vllm_config.speculative_config is not None,
            "speculative decoding: a draft model has its own experts",
        ),
    )


def routes_own_tokens(layer: Any) -> bool:
    """Return whether the layer's router sees only the tokens of its own rank, before their dispatch.

    Otherwise it sees the tokens of all ranks, because they were gathered or all ranks have the same ones.
    """
    sees_own_tokens: bool = (
        layer.moe_config.moe_parallel_config.use_all2all_kernels and not layer.do_naive_dispatch_combine
    )
    return sees_own_tokens


def run_before_eplb_mapping(router: BaseRouter, prepare: Callable[[Tensor], None]) -> None:
    """Call prepare(top-k ids) before each mapping of a batch's experts to their replicas."""
    apply_mapping = router._apply_eplb_mapping

    def prepare_and_map(topk_ids: Tensor) -> Tensor:
        prepare(topk_ids)
        replicas: Tensor = apply_mapping(topk_ids)
        return replicas

    router._apply_eplb_mapping = prepare_and_map
