"""The internal names of vLLM that this package leans on, in one place. Checked on vLLM 0.32.0."""

from __future__ import annotations

import importlib
import logging
import os
import pkgutil
import socket
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import vllm
from torch import Tensor
from torch.overrides import TorchFunctionMode
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
    "DescribedEngine",
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
    _check_names(
        "the choice of an MoE kernel",
        (mxfp4, "_get_priority_backends_for_gpt_oss"),
        (mxfp4, "backend_to_kernel_cls"),
    )
    first = next(
        kernel
        for backend in mxfp4._get_priority_backends_for_gpt_oss()
        for kernel in mxfp4.backend_to_kernel_cls(backend)
        if kernel._supports_current_device()
    )
    if _hides_choices(first):
        kernels.moe_backend = "marlin"
        logger.warning(
            "MoE kernel: marlin, since vLLM's first choice, %s, hides the experts it chooses", first.__name__
        )


def _hides_choices(kernel: Any) -> bool:
    """Whether a kernel's class routes inside, and has no record of what it chose."""
    replay = FusedMoEExpertsMonolithic.supports_routing_replay_capture
    return issubclass(kernel, FusedMoEExpertsMonolithic) and kernel.supports_routing_replay_capture is replay


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


# -- an engine that is described and not made (eldr_serve/check) ----------------------------------------


# By table: kernel libraries that come with vLLM's GPU wheel, for which its selectors look in vain elsewhere.
_GPU_WHEEL = (
    "has_deep_gemm",
    "has_flashinfer",
    "has_flashinfer_cutlass_fused_moe",
    "has_flashinfer_moe",
    "has_flashinfer_trtllm_fused_moe",
    "has_triton_kernels",
)
_SELECTORS = (
    "vllm.model_executor.layers.fused_moe",
    "vllm.model_executor.layers.quantization",
    "vllm.utils",
    __name__,
)


class _FirstRank:
    """The first rank of a group: knows how many there are, and talks to none of them."""

    def __init__(self, size: int) -> None:
        self.world_size = size
        self.ranks = list(range(size))
        self.rank = self.rank_in_group = self.local_rank = 0
        self.is_first_rank = True
        self.is_last_rank = size == 1
        self.device_group = self.cpu_group = self
        self.device_communicator = None

    def size(self) -> int:
        return self.world_size


class _Weightless(TorchFunctionMode):
    """Within it, tensors of more than a few thousand elements are made with a shape and no storage."""

    _MAKERS = (torch.empty, torch.zeros, torch.ones, torch.full, torch.rand, torch.randn)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        if func in self._MAKERS and given.get("device") is None:
            made = func(*args, **given | {"device": "meta"})
            if made.numel() > 4096:
                return made
        return func(*args, **given)


@contextmanager
def _selecting_for(capability: tuple[int, int] | None) -> Iterator[None]:
    """Within it, vLLM selects MoE kernels as on a GPU of that CUDA capability; none: as on this machine."""
    if capability is None:
        yield
        return
    from vllm.model_executor.layers.fused_moe import experts
    from vllm.platforms.interface import DeviceCapability, Platform, PlatformEnum

    major, minor = capability

    class Described(Platform):
        _enum = PlatformEnum.CUDA
        device_name = device_type = "cuda"

        @classmethod
        def get_device_capability(cls, device_id: int = 0) -> DeviceCapability:
            return DeviceCapability(major, minor)

    for found in pkgutil.iter_modules(experts.__path__, f"{experts.__name__}."):
        with suppress(ImportError, AttributeError):  # not all can be imported without their kernels
            importlib.import_module(found.name)
    told = {"current_platform": Described()} | dict.fromkeys(_GPU_WHEEL, lambda: True)
    usual = [
        (module, name, vars(module)[name])
        for key, module in list(sys.modules.items())
        if key.startswith(_SELECTORS)
        for name in told.keys() & vars(module).keys()
    ]
    try:
        for module, name, _ in usual:
            setattr(module, name, told[name])
        yield
    finally:
        for module, name, value in usual:
            setattr(module, name, value)


class KvCapacity(NamedTuple):
    """KV tokens, and sequences of max_model_len at the same time."""

    tokens: int
    sequences: float


class DescribedEngine:
    """An engine's configuration and its first rank's model, whose tensors have shapes and no storage.

    All is vLLM's own on its CPU platform, but for the selection of MoE kernels.

    Args:
        arguments: for AsyncEngineArgs; the model is a folder with a config.json.
        capability: CUDA capability of the described GPU; none: the engine is one for CPUs.

    Raises:
        ValueError: vLLM refuses them.
    """

    def __init__(self, arguments: dict[str, Any], capability: tuple[int, int] | None) -> None:
        from vllm.config import set_current_vllm_config
        from vllm.distributed import parallel_state
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.model_executor.model_loader.utils import get_model_architecture, initialize_model
        from vllm.usage.usage_lib import UsageContext

        ranks = arguments.get("tensor_parallel_size", 1)
        given = arguments | {
            "skip_tokenizer_init": True,
            "load_format": "dummy",
            "distributed_executor_backend": "mp" if ranks > 1 else "uni",
        }
        self.config = AsyncEngineArgs(**given).create_engine_config(UsageContext.OPENAI_API_SERVER)
        for name, size in (("WORLD", ranks), ("TP", ranks), ("EP", ranks)):
            setattr(parallel_state, f"_{name}", _FirstRank(size))
        for name in ("PP", "DP", "DCP", "PCP", "EPLB"):
            setattr(parallel_state, f"_{name}", _FirstRank(1))
        get_model_architecture(self.config.model_config)  # its modules see this machine
        usual = torch.get_default_dtype()
        torch.set_default_dtype(self.config.model_config.dtype)
        try:
            with set_current_vllm_config(self.config), _Weightless(), _selecting_for(capability):
                choose_open_kernel(self.config)  # as our worker does
                self._model = initialize_model(self.config)
        finally:
            torch.set_default_dtype(usual)
        self._layers = self.config.compilation_config.static_forward_context

    def weight_bytes(self) -> int:
        """Of the first rank's parameters."""
        return sum(p.numel() * p.element_size() for p in self._model.parameters())

    def kernels(self) -> set[tuple[str, bool]]:
        """(name of the MoE kernel, whether it hides the experts that it chooses) of all MoE layers."""
        methods = [
            layer._quant_method
            for layer in self._layers.values()
            if getattr(layer, "router", None) is not None
        ]
        named = ((getattr(method, "experts_cls", None) or type(method), method) for method in methods)
        return {
            (kind.__name__, bool(method.is_monolithic) and (kind is type(method) or _hides_choices(kind)))
            for kind, method in named
        }

    def check(self) -> None:
        """Raise UnsupportedEngineError where our connector would."""
        check_engine(self.config)
        counted_group(self.config, self._planned(2**60))

    def kv_cache(self, available: int) -> KvCapacity:
        """What a KV cache of so many bytes holds.

        Args:
            available: bytes for the KV cache of one rank.

        Raises:
            ValueError: there is no room for one sequence.
        """
        planned = self._planned(available)
        sequences = kv_cache_utils.get_max_concurrency_for_kv_cache_config(self.config, planned)
        return KvCapacity(int(sequences * self.config.model_config.max_model_len), sequences)

    def _planned(self, available: int) -> KVCacheConfig:
        from vllm.v1.attention.backends.utils import get_supported_kv_cache_layouts, resolve_kv_cache_layout

        specs = {
            name: layer.get_kv_cache_spec(self.config)
            for name, layer in self._layers.items()
            if hasattr(layer, "get_kv_cache_spec") and getattr(layer, "router", None) is None
        }
        specs = {name: spec for name, spec in specs.items() if spec is not None}
        backends = [self._layers[name].get_attn_backend() for name in specs]
        layouts = [layout.name for layout in get_supported_kv_cache_layouts(backends)]
        resolve_kv_cache_layout(self.config, [layouts], specs.values())
        (found,) = kv_cache_utils.get_kv_cache_configs(self.config, [specs], [available])
        return found
