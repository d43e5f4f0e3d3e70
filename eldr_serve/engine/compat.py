"""The internal names of vLLM that this package leans on, in one place. Checked on vLLM 0.32.0."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import vllm
from torch import Tensor
from vllm.config import VllmConfig
from vllm.distributed import get_ep_group
from vllm.distributed.eplb.eplb_state import EplbLayerState, EplbState
from vllm.distributed.eplb.policy.abstract import AbstractEplbPolicy
from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group
from vllm.distributed.kv_transfer.kv_connector.v1.nixl import base_worker
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector import NixlPullConnector
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import NixlConnectorMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.stats import NixlKVConnectorStats, NixlPromMetrics
from vllm.distributed.parallel_state import get_node_count, get_tensor_model_parallel_rank
from vllm.forward_context import ForwardContext, get_forward_context, is_forward_context_available
from vllm.model_executor.layers.fused_moe.modular_kernel import FusedMoEExpertsMonolithic
from vllm.model_executor.layers.fused_moe.oracle import mxfp4
from vllm.model_executor.layers.fused_moe.routed_experts_capturer import RoutedExpertsSink
from vllm.model_executor.layers.fused_moe.router.base_router import BaseRouter
from vllm.model_executor.layers.fused_moe.router.cpu_router import CPURouter
from vllm.model_executor.layers.fused_moe.router.zero_expert_router import ZeroExpertRouter
from vllm.model_executor.models.utils import extract_layer_index
from vllm.platforms import current_platform
from vllm.v1.core import kv_cache_utils
from vllm.v1.kv_cache_interface import KVCacheConfig, SlidingWindowSpec, is_full_attention_spec

__all__ = [
    "CHECKED",
    "AbstractEplbPolicy",
    "CountedGroup",
    "EplbState",
    "NixlConnectorMetadata",
    "NixlKVConnectorStats",
    "NixlPromMetrics",
    "NixlPullConnector",
    "UnsupportedEngineError",
    "before_eplb_mapping",
    "check_engine",
    "check_expert_placement",
    "check_side_channel",
    "choose_open_kernel",
    "clear_refusal",
    "counted_group",
    "expire_send_leases",
    "forward_slots",
    "fused_moe",
    "get_ep_group",
    "get_kv_transfer_group",
    "get_node_count",
    "get_tensor_model_parallel_rank",
    "graph_slots",
    "has_kv_transfer_group",
    "kept_affinity",
    "model_runner",
    "moe_layers",
    "moe_routers",
    "polled_nixl",
    "routes_own_tokens",
]

CHECKED = "0.32.0"

logger = logging.getLogger(__name__)


class UnsupportedEngineError(RuntimeError):
    """The engine cannot serve as it is set up, or its counts would not be exact; one sentence says how."""


def check_engine(vllm_config: VllmConfig) -> None:
    """Raise UnsupportedEngineError if this engine cannot be served with exact signatures."""
    _check_vllm()
    parallel = vllm_config.parallel_config
    refusals = (
        (parallel.pipeline_parallel_size > 1, "pipeline parallelism: each stage sees only its own layers"),
        (parallel.data_parallel_size > 1, "data parallelism inside an engine: run one engine a replica"),
        (
            parallel.decode_context_parallel_size > 1,
            "decode context parallelism: a block's tokens are spread",
        ),
        (
            parallel.prefill_context_parallel_size > 1,
            "prefill context parallelism: each rank sees a part of a prompt",
        ),
        (
            vllm_config.speculative_config is not None
            and vllm_config.kv_transfer_config.kv_role not in ("kv_consumer", "kv_producer"),
            "speculative decoding in calibration: rejected tokens would be counted",
        ),
        (parallel.enable_dbo, "dual-batch overlap: a step's tokens pass the gates in two parts"),
        (
            vllm_config.aux_output_config.enable_return_routed_experts,
            "enable_return_routed_experts: vLLM's own capture would replace this one",
        ),
    )
    for refused, reason in refusals:
        if refused:
            raise UnsupportedEngineError(f"the ELDR connector does not support {reason}")


@dataclass(frozen=True)
class CountedGroup:
    """The KV cache group by whose blocks tokens are counted.

    Attributes:
        index: its place among the engine's groups.
        block_size: tokens a block.
        layer: the name of one of its layers.
    """

    index: int
    block_size: int
    layer: str


def counted_group(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> CountedGroup:
    """The group whose blocks hold all tokens of a prompt until it ends: one of full attention.

    Groups of sliding windows, chunks and recurrent states give blocks back before, or keep a state
    instead of tokens. UnsupportedEngineError if the engine has no other, or if a prefix hit could end
    within a block of the group: what the block counted beyond the hit could not be told apart.
    """
    for index, group in enumerate(kv_cache_config.kv_cache_groups):
        spec = group.kv_cache_spec
        stands = is_full_attention_spec(spec) or (
            isinstance(spec, SlidingWindowSpec)
            and spec.sliding_window >= vllm_config.model_config.max_model_len
        )
        if stands and not group.host_resident:
            _check_whole_hits(vllm_config, kv_cache_config, spec.block_size)
            return CountedGroup(index, spec.block_size, group.layer_names[0])
    kinds = ", ".join(type(group.kv_cache_spec).__name__ for group in kv_cache_config.kv_cache_groups)
    raise UnsupportedEngineError(
        f"the ELDR connector does not support a KV cache without full attention ({kinds}): blocks are given "
        "back before their prompt ends; set max_model_len to at most the sliding window, if it has one"
    )


def _check_whole_hits(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, block_size: int) -> None:
    cache = vllm_config.cache_config
    if not cache.enable_prefix_caching or len(kv_cache_config.kv_cache_groups) == 1:
        return
    _, unit = kv_cache_utils.resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)
    if unit % block_size and kv_cache_utils.partial_hash_hits_enabled(kv_cache_config.kv_cache_groups, unit):
        unset = cache.prefix_match_unit is None
        remedy = "enable_prefix_caching to false" if unset else "no prefix_match_unit"
        raise UnsupportedEngineError(
            f"the ELDR connector does not support prefix hits that end within a block ({unit} tokens of a "
            f"block's {block_size}): set {remedy}"
        )


def _check_vllm() -> None:
    """The names that no public interface promises are there."""
    _check_names(
        "the ELDR connector",
        (BaseRouter, "set_capture_fn"),
        (FusedMoEExpertsMonolithic, "supports_routing_replay_capture"),
        (NixlPullConnector, "bind_kv_cache_manager"),
        (NixlPullConnector, "finish_forward"),
        (NixlPullConnector, "build_connector_worker_meta"),
        (NixlPullConnector, "request_finished_all_groups"),
        (NixlPullConnector, "get_transfer_results"),
        (base_worker, "nixl_agent_config"),
        (ForwardContext, "slot_mapping"),
        (kv_cache_utils, "resolve_kv_cache_block_sizes"),
        (kv_cache_utils, "partial_hash_hits_enabled"),
        (VllmConfig, "use_v2_model_runner"),
    )


def _check_names(user: str, *needed: tuple[Any, str]) -> None:
    for owner, name in needed:
        # A dataclass's field without a default is no attribute of the class.
        if not hasattr(owner, name) and name not in getattr(owner, "__annotations__", {}):
            raise UnsupportedEngineError(
                f"vLLM {vllm.__version__} has no {owner.__name__}.{name}, which {user} needs; "
                f"it was checked on {CHECKED}"
            )


def check_expert_placement(vllm_config: VllmConfig) -> None:
    """Raise UnsupportedEngineError if this engine cannot hold a placement of ours (engine/eplb.py)."""
    _check_names(
        "expert placement",
        (BaseRouter, "_apply_eplb_mapping"),
        (EplbState, "rearrange"),
        (EplbLayerState, "logical_to_physical_map"),
        (EplbLayerState, "logical_replica_count"),
    )
    parallel = vllm_config.parallel_config
    refusals = (
        (not parallel.enable_eplb, "an engine without enable_expert_parallel and enable_eplb"),
        (parallel.eplb_config.use_async, "asynchronous EPLB: set use_async to false"),
        (parallel.enable_elastic_ep, "elastic expert parallelism: ranks would come and go"),
        (parallel.enable_dbo, "dual-batch overlap: two batches would share one choice of replicas"),
        (
            vllm_config.speculative_config is not None,
            "speculative decoding: a draft model has its own experts",
        ),
    )
    for refused, reason in refusals:
        if refused:
            raise UnsupportedEngineError(f"expert placement does not support {reason}")


def routes_own_tokens(layer: Any) -> bool:
    """Whether the layer's router sees the tokens of its own rank alone, which are dispatched afterwards.

    Else it sees those of all ranks: they are gathered before it, or all ranks hold the same.
    """
    own: bool = (
        layer.moe_config.moe_parallel_config.use_all2all_kernels and not layer.do_naive_dispatch_combine
    )
    return own


def moe_routers(vllm_config: VllmConfig) -> list[tuple[int, Any]]:
    """(layer index, what shows the layer's choices) of each MoE layer, ascending.

    That is its BaseRouter or, where the kernel routes inside, the kernel's own record of it.
    UnsupportedEngineError where a layer's choices are hidden.
    """
    return [(index, _shown(index, layer)) for index, layer in moe_layers(vllm_config)]


def _shown(index: int, layer: Any) -> Any:
    method = getattr(layer, "_quant_method", None)
    if not getattr(method, "is_monolithic", False):
        return layer.router
    experts = getattr(getattr(getattr(method, "moe_kernel", None), "impl", None), "fused_experts", None)
    if isinstance(experts, FusedMoEExpertsMonolithic) and experts.supports_routing_replay_capture():
        return RoutingKernel(layer, experts)
    raise UnsupportedEngineError(
        f"MoE layer {index} runs {type(experts or method).__name__}, which routes inside and hides its "
        "choices; choose another kernel with moe_backend"
    )


class RoutingKernel:
    """A MoE layer's kernel that routes inside, and writes down what it chose where vLLM's own replay asks.

    Args:
        layer: vLLM's layer, whose router is not used.
        experts: its kernel.
    """

    def __init__(self, layer: Any, experts: FusedMoEExpertsMonolithic) -> None:
        self.top_k, self.global_num_experts = layer.router.top_k, layer.router.global_num_experts
        self._layer, self._config = layer, experts.moe_config

    def set_capture_fn(self, capture_fn: Callable[[Tensor], None]) -> None:
        """As BaseRouter: capture_fn gets each batch's choices, int16[T, k]."""
        self._layer.routed_experts.routing_sink = RoutedExpertsSink(self._config, capture_fn)


def choose_open_kernel(vllm_config: VllmConfig) -> None:
    """Before the model is made: Marlin, where vLLM would choose a kernel that hides its choices.

    On CUDA that is OpenAI's Triton kernel for the MXFP4 of GPT-OSS, which is vLLM's first choice on
    Hopper. FlashInfer's TRT-LLM kernels (Blackwell) route inside, too, but show what they chose.
    """
    kernels = vllm_config.kernel_config
    if (
        kernels.moe_backend != "auto"
        or vllm_config.model_config.quantization != "gpt_oss_mxfp4"
        or vllm_config.parallel_config.enable_eplb  # there such kernels are not taken
        or not current_platform.is_cuda()
    ):
        return
    first = next(
        kernel
        for backend in mxfp4._get_priority_backends_for_gpt_oss()
        for kernel in mxfp4.backend_to_kernel_cls(backend)
        if kernel._supports_current_device()
    )
    replay = FusedMoEExpertsMonolithic.supports_routing_replay_capture
    if issubclass(first, FusedMoEExpertsMonolithic) and first.supports_routing_replay_capture is replay:
        kernels.moe_backend = "marlin"
        logger.warning(
            "MoE kernel: marlin, since vLLM's first choice, %s, hides the experts it chooses", first.__name__
        )


def moe_layers(vllm_config: VllmConfig) -> list[tuple[int, Any]]:
    """(layer index, layer) of each MoE layer of the model, ascending; a drafter's layers are left out.

    Raises:
        UnsupportedEngineError: a router that shows no choices, or no MoE layer.
    """
    found: list[tuple[int, Any]] = []
    model = None  # what the names of the model's layers begin with; it is made before its drafter
    for name, layer in vllm_config.compilation_config.static_forward_context.items():
        router = getattr(layer, "router", None)
        if router is None:
            continue
        index = extract_layer_index(name)
        prefix = name.split(f".{index}.")[0]
        model = model or prefix
        if vllm_config.speculative_config is not None and (
            prefix != model or index >= vllm_config.model_config.get_total_num_hidden_layers()
        ):
            continue
        if not isinstance(router, BaseRouter):
            raise UnsupportedEngineError(
                f"layer {name} has a router of type {type(router).__name__}, which shows no choices "
                f"(vLLM {vllm.__version__}; checked on {CHECKED})"
            )
        _check_router(name, router)
        found.append((index, layer))
    if not found:
        raise UnsupportedEngineError(
            f"no MoE layer was found in the model (vLLM {vllm.__version__}; checked on {CHECKED})"
        )
    return sorted(found, key=lambda pair: pair[0])


def _check_router(name: str, router: BaseRouter) -> None:
    """Raise UnsupportedEngineError if what the router shows is not what the model chose."""
    if isinstance(router, ZeroExpertRouter):
        raise UnsupportedEngineError(
            f"layer {name} has zero experts, which vLLM {vllm.__version__} renames to expert 0 before it "
            "shows the choices; serve this model with vLLM's own connector, without locality"
        )
    if isinstance(router, CPURouter) and router.e_score_correction_bias is not None:
        plain = not router.use_grouped_topk and router.custom_routing_function is None
        if plain and router.scoring_func == "softmax":
            raise UnsupportedEngineError(
                f"layer {name} has a correction bias, which vLLM {vllm.__version__} leaves out on CPUs, so "
                "that tokens go to other experts than the model's; serve this model on GPUs"
            )


def fused_moe(w13: Tensor, w2: Tensor) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """A layer's experts by the kernel that vLLM serves with, bf16: its CPU kernel, or Triton's on CUDA.

    Args:
        w13: [S, 2I, H], gate over up; w2: [S, H, I].

    Returns:
        From rows [T, H], weights float32[T, k] and experts int32[T, k] to [T, H].
    """
    if w13.is_cuda:
        from vllm.model_executor.layers.fused_moe.fused_moe import fused_experts

        def on_cuda(rows: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
            out: Tensor = fused_experts(rows, w13, w2, weights, experts)
            return out

        return on_cuda
    from vllm import _custom_ops as ops

    isa = "amx" if torch.cpu._is_amx_tile_supported() else "vec"
    packed13, packed2 = (ops.cpu_prepack_moe_weight(w, isa) for w in (w13, w2))

    def on_cpu(rows: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        out = torch.empty_like(rows)
        ops.cpu_fused_moe(out, rows, packed13, packed2, None, None, weights, experts, "silu", isa)
        return out

    return on_cpu


def forward_slots(layer: str) -> Tensor | None:
    """int64[T], the layer's KV slot of each token of the forward that is about to run; None outside of one.

    Both of vLLM's model runners bind a step's metadata to the connector within the forward's context.
    Only where Model Runner V2 replays a full CUDA graph is there none: see `graph_slots`.
    """
    if not is_forward_context_available():
        return None
    slots = get_forward_context().slot_mapping
    if isinstance(slots, list):
        raise UnsupportedEngineError("the ELDR connector does not support micro-batches")
    found: Tensor | None = slots.get(layer)
    return found


def graph_slots(load_kwargs: dict[str, Any], layer: str) -> Tensor | None:
    """The same, from what Model Runner V2 passes to `start_load_kv` around a full CUDA graph, else None."""
    attention = (load_kwargs.get("attn_metadata") or {}).get(layer)
    slots: Tensor | None = getattr(attention, "slot_mapping", None)
    return slots


def model_runner(vllm_config: VllmConfig) -> str:
    """vLLM's version and which of its model runners the engine uses, for messages."""
    return f"vLLM {vllm.__version__}, Model Runner {'V2' if vllm_config.use_v2_model_runner else 'V1'}"


def check_side_channel(scheduler: Any) -> None:
    """Raise UnsupportedEngineError if NIXL's side channel cannot listen: vLLM would wait for ever."""
    if scheduler._nixl_handshake_listener_t is not None:
        return  # it listens already
    host, port = scheduler.side_channel_host, scheduler.side_channel_port
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        socket.create_server(address[:2], family=family).close()
    except OSError as error:
        raise UnsupportedEngineError(
            f"NIXL's side channel cannot listen at {host}:{port} ({error.strerror}); set "
            "VLLM_NIXL_SIDE_CHANNEL_HOST to an address of this machine and VLLM_NIXL_SIDE_CHANNEL_PORT, "
            "under Ray NIXL_SIDE_CHANNEL_PORT_BASE in experimental_configs, to a free port"
        ) from error


def expire_send_leases(worker: Any, engine_ids: Iterable[str]) -> None:
    """End the leases of finished prompts; their blocks are freed when transfers are next looked at."""
    for engine_id in engine_ids:
        if engine_id in worker._reqs_to_send:
            worker._reqs_to_send[engine_id] = 0.0


def before_eplb_mapping(router: BaseRouter, prepare: Callable[[Tensor], None]) -> None:
    """Call prepare(top-k ids) before each mapping of a batch's experts to their replicas."""
    mapped = router._apply_eplb_mapping

    def prepared(topk_ids: Tensor) -> Tensor:
        prepare(topk_ids)
        routed: Tensor = mapped(topk_ids)
        return routed

    router._apply_eplb_mapping = prepared


@contextmanager
def kept_affinity() -> Iterator[None]:
    """Within it, making a connector does not bind this thread to other cores for good.

    On CPU NIXL's worker binds the thread that makes it to the last core of each NUMA node, to keep
    transfers from the model's cores. But that thread runs the model too: all engines of a machine
    would share that one core.
    """
    if not hasattr(os, "sched_getaffinity"):
        yield
        return
    cores = os.sched_getaffinity(0)
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


@contextmanager
def clear_refusal() -> Iterator[None]:
    """Within it, a KV cache that NIXL cannot transfer is refused as other engines are."""
    try:
        yield
    except NotImplementedError as error:
        raise UnsupportedEngineError(
            f"NIXL cannot transfer this model's KV cache ({error}); serve it by engines that both prefill "
            "and decode, without locality"
        ) from error


@contextmanager
def polled_nixl() -> Iterator[None]:
    """Within it, a NIXL agent is made without its progress thread where engines share CPU cores.

    The thread spins: it takes a whole core for each engine, idle or not, and vLLM has no setting for it.
    Without it transfers progress when the engine looks at them, which it does in every step, and it
    steps as long as a transfer or a lease is open. On GPUs the thread stays.
    """
    original = getattr(base_worker, "nixl_agent_config", None)
    if not current_platform.is_cpu() or original is None:
        yield
        return
    base_worker.nixl_agent_config = partial(original, enable_prog_thread=False)
    try:
        yield
    finally:
        base_worker.nixl_agent_config = original
