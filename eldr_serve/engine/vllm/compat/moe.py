"""The routers of vLLM's MoE layers, and kernels with internal routing, in its workers."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
import vllm
from torch import Tensor
from vllm.config import VllmConfig

from eldr_serve.engine.vllm.compat.checked import (
    SUPPORTED_VLLM,
    UnsupportedEngineError,
    check_names,
    internal_imports,
)

with internal_imports():
    from vllm.model_executor.layers.fused_moe import unquantized_fused_moe_method as unquantized
    from vllm.model_executor.layers.fused_moe.modular_kernel import FusedMoEExpertsMonolithic
    from vllm.model_executor.layers.fused_moe.oracle import mxfp4
    from vllm.model_executor.layers.fused_moe.routed_experts_capturer import RoutedExpertsSink
    from vllm.model_executor.layers.fused_moe.router.base_router import BaseRouter
    from vllm.model_executor.layers.fused_moe.router.cpu_router import CPURouter
    from vllm.model_executor.layers.fused_moe.router.zero_expert_router import ZeroExpertRouter
    from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner
    from vllm.model_executor.models.utils import extract_layer_index
    from vllm.platforms import current_platform

logger = logging.getLogger(__name__)

# Copied from vLLM 0.32.0: MoE models that embed positions in tensors [tokens, heads, size].
_ROTARY_BY_HEAD = ("lfm2_moe",)


def moe_layers(vllm_config: VllmConfig) -> list[tuple[int, Any]]:
    """Return (layer index, layer) of each MoE layer of the model, ascending, without a drafter's layers.

    Raises:
        UnsupportedEngineError: a router does not expose its choices, or the model has no MoE layer.
    """
    layers: list[tuple[int, Any]] = []
    model_prefix = None  # prefix of the model's layer names, which precede the drafter's layers
    for name, layer in vllm_config.compilation_config.static_forward_context.items():
        router = getattr(layer, "router", None)
        if router is None:
            continue
        index = extract_layer_index(name)
        prefix = name.split(f".{index}.")[0]
        model_prefix = model_prefix or prefix
        if vllm_config.speculative_config is not None and (
            prefix != model_prefix or index >= vllm_config.model_config.get_total_num_hidden_layers()
        ):
            continue
        if not isinstance(router, BaseRouter):
            raise UnsupportedEngineError(
                f"layer {name} has a router of type {type(router).__name__}, which does not show its choices "
                f"(vLLM {vllm.__version__}; checked on {SUPPORTED_VLLM})"
            )
        _check_router(name, router)
        _check_ranks(name, layer)
        layers.append((index, layer))
    if not layers:
        raise UnsupportedEngineError(
            "no MoE layer was found in the model, so there are no experts to count: name a model with "
            f"experts, or serve this one with vLLM alone (vLLM {vllm.__version__}; checked on "
            f"{SUPPORTED_VLLM})"
        )
    return sorted(layers, key=lambda pair: pair[0])


def _check_ranks(name: str, layer: Any) -> None:
    """Raise UnsupportedEngineError if vLLM's CPU kernel would read experts of another rank."""
    if type(layer) is MoERunner and current_platform.is_cpu() and layer.moe_config.moe_parallel_config.use_ep:
        raise UnsupportedEngineError(
            f"layer {name} uses expert parallelism, with which vLLM {vllm.__version__} crashes on CPUs: set "
            "ELDR_EXPERT_PARALLEL=1 in the environment of the engine"
        )


def _explain_shared_routing(part: str) -> str:
    """Return the error's text for a part that chooses experts after ranks have exchanged their tokens."""
    return (
        f"{part} routes the tokens of all data-parallel ranks together, so that a rank cannot count its own; "
        "choose another kernel with moe_backend"
    )


def check_kernel_of_ranks(kernel: Any, moe_config: Any) -> None:
    """Raise UnsupportedEngineError if data-parallel ranks have an MoE kernel that routes internally.

    vLLM gathers the tokens of all ranks before such a kernel, whatever the `all2all_backend` is. Other
    kernels get the tokens after each rank has routed its own.

    Args:
        kernel: class of the kernel.
        moe_config: vLLM's configuration of the layer.
    """
    if moe_config.dp_size > 1:
        raise UnsupportedEngineError(_explain_shared_routing(kernel.__name__))


def _check_rotary(vllm_config: VllmConfig) -> None:
    """Raise UnsupportedEngineError if vLLM's CPU kernel would embed wrong positions.

    The kernel treats a separate axis of heads as tokens, so all heads but the first get a wrong position.
    """
    model = vllm_config.model_config.hf_text_config.model_type
    if (
        model in _ROTARY_BY_HEAD
        and current_platform.is_cpu()
        and vllm_config.compilation_config.is_custom_op_enabled("rotary_embedding")
    ):
        raise UnsupportedEngineError(
            f"vLLM {vllm.__version__} embeds the positions of {model} wrongly on CPUs, so that tokens go to "
            'other experts than the model\'s: set compilation_config to {"custom_ops": ["-rotary_embedding"]}'
        )


def _check_router(name: str, router: BaseRouter) -> None:
    """Raise UnsupportedEngineError if the router reports other choices than the model makes."""
    if isinstance(router, ZeroExpertRouter):
        raise UnsupportedEngineError(
            f"layer {name} has zero experts, which vLLM {vllm.__version__} renames to expert 0 before it "
            "shows the choices; serve this model with vLLM's own connector, without locality"
        )
    if not isinstance(router, CPURouter) or router.use_grouped_topk or router.custom_routing_function:
        return
    if router.scoring_func not in ("softmax", "sqrtsoftplus"):
        raise UnsupportedEngineError(
            f"layer {name} scores experts by {router.scoring_func} and without groups, which vLLM "
            f"{vllm.__version__} does not support on CPUs; serve this model on GPUs"
        )
    if router.scoring_func == "softmax" and router.e_score_correction_bias is not None:
        raise UnsupportedEngineError(
            f"layer {name} has a correction bias, which vLLM {vllm.__version__} leaves out on CPUs, so "
            "that tokens go to other experts than the model's; serve this model on GPUs"
        )


def moe_routers(vllm_config: VllmConfig) -> list[tuple[int, Any]]:
    """Return (layer index, source of the layer's choices) of each MoE layer, ascending.

    The source is the layer's BaseRouter or, if the kernel routes internally, a RoutingKernel. It is an
    OwnChoices if the layer also routes the tokens of other ranks, and a RouterOfReplicas if vLLM's EPLB has
    redundant experts.

    Raises:
        UnsupportedEngineError: a layer hides its choices, or layers differ in experts or top-k.
    """
    _check_rotary(vllm_config)
    routers = [(index, _find_source(index, layer)) for index, layer in moe_layers(vllm_config)]
    if redundant := vllm_config.parallel_config.eplb_config.num_redundant_experts:
        routers = [(index, RouterOfReplicas(source, redundant)) for index, source in routers]
    first, source = routers[0]
    for index, other in routers:
        if (other.global_num_experts, other.top_k) != (source.global_num_experts, source.top_k):
            raise UnsupportedEngineError(
                f"MoE layer {index} chooses {other.top_k} of {other.global_num_experts} experts, and layer "
                f"{first} chooses {source.top_k} of {source.global_num_experts}; expert counts need the same "
                "numbers in all layers: serve this model with vLLM's own connector, without locality"
            )
    return routers


def _find_source(index: int, layer: Any) -> Any:
    method = getattr(layer, "_quant_method", None)
    if getattr(layer, "do_naive_dispatch_combine", False):
        raise UnsupportedEngineError(_explain_shared_routing(f"MoE layer {index}"))
    if not getattr(method, "is_monolithic", False):
        return getattr(layer, "own_choices", layer.router)
    experts = getattr(getattr(getattr(method, "moe_kernel", None), "impl", None), "fused_experts", None)
    if isinstance(experts, FusedMoEExpertsMonolithic) and experts.supports_routing_replay_capture():
        check_kernel_of_ranks(type(experts), experts.moe_config)
        return RoutingKernel(layer, experts)
    raise UnsupportedEngineError(
        f"MoE layer {index} runs {type(experts or method).__name__}, whose router runs inside the kernel, "
        "so the chosen experts cannot be read; choose another kernel with moe_backend"
    )


class RoutingKernel:
    """A kernel with internal routing, which reports its choices through vLLM's routing replay.

    Args:
        layer: vLLM's MoE layer; its router is not used.
        experts: the layer's kernel.
    """

    def __init__(self, layer: Any, experts: FusedMoEExpertsMonolithic) -> None:
        self.top_k, self.global_num_experts = layer.router.top_k, layer.router.global_num_experts
        self._layer, self._config = layer, experts.moe_config

    def set_capture_fn(self, capture_fn: Callable[[Tensor], None]) -> None:
        """Pass each batch's choices, int16[T, k], to a callback; the interface of BaseRouter."""
        self._layer.routed_experts.routing_sink = RoutedExpertsSink(self._config, capture_fn)


class RouterOfReplicas:
    """A router whose number of experts includes replicas, although its choices name logical experts.

    Args:
        router: the source of a layer's choices.
        num_redundant: number of the layer's slots beyond one per expert.
    """

    def __init__(self, router: Any, num_redundant: int) -> None:
        self.top_k, self.global_num_experts = router.top_k, router.global_num_experts - num_redundant
        self.set_capture_fn = router.set_capture_fn


def avoid_kernels_that_hide_choices(vllm_config: VllmConfig) -> None:
    """Select Marlin if vLLM would select a kernel that hides its choices; call it before the model is made.

    On CUDA that is OpenAI's Triton kernel for the MXFP4 of GPT-OSS, vLLM's first choice on Hopper.
    FlashInfer's TRT-LLM kernels (Blackwell) also route internally, but report their choices.
    """
    kernels = vllm_config.kernel_config
    if (
        kernels.moe_backend != "auto"
        or vllm_config.model_config.quantization != "gpt_oss_mxfp4"
        or vllm_config.parallel_config.enable_eplb  # with EPLB vLLM selects no such kernel
        or not current_platform.is_cuda()
    ):
        return
    check_names(
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
    if not reveals_experts(first):
        kernels.moe_backend = "marlin"
        logger.warning(
            "MoE kernel: marlin, since vLLM's first choice, %s, hides the experts it chooses", first.__name__
        )


def reveals_experts(kernel: Any) -> bool:
    """Return whether a kernel class routes outside the kernel, or reports its choices."""
    replay = FusedMoEExpertsMonolithic.supports_routing_replay_capture
    return (
        not issubclass(kernel, FusedMoEExpertsMonolithic)
        or kernel.supports_routing_replay_capture is not replay
    )


def fused_moe(w13: Tensor, w2: Tensor) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Return a layer's experts as a function.

    It computes in bf16, by vLLM's Triton kernel on CUDA and by its CPU kernel elsewhere.

    Args:
        w13: [S, 2I, H], gate over up; w2: [S, H, I].

    Returns:
        Function of rows [T, H], weights float32[T, k] and experts int32[T, k] that returns [T, H].
    """
    if current_platform.is_cuda():
        with internal_imports():
            from vllm.model_executor.layers.fused_moe.fused_moe import fused_experts

        def on_cuda(rows: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
            out: Tensor = fused_experts(rows, w13, w2, weights, experts)
            return out

        return on_cuda
    with internal_imports():
        from vllm import _custom_ops as ops

    isa = "amx" if torch.cpu._is_amx_tile_supported() else "vec"
    packed13, packed2 = (ops.cpu_prepack_moe_weight(w, isa) for w in (w13, w2))

    def on_cpu(rows: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        out = torch.empty_like(rows)
        ops.cpu_fused_moe(out, rows, packed13, packed2, None, None, weights, experts, "silu", isa)
        return out

    return on_cpu


def check_vllm_names() -> None:
    """Raise UnsupportedEngineError if vLLM lacks a method that this module uses.

    Attributes that vLLM sets on instances are not checked.
    """
    check_names(
        "the ELDR connector",
        (BaseRouter, "set_capture_fn"),
        (FusedMoEExpertsMonolithic, "supports_routing_replay_capture"),
        (MoERunner, "do_naive_dispatch_combine"),
    )


def keep_cpu_kernel_beside_adapters() -> None:
    """Make vLLM choose its CPU kernel for experts that no adapter changes; call it before the model is made.

    With LoRA vLLM chooses Triton's kernel on every device, and that kernel does not run on CPUs.
    """
    check_names("LoRA on CPUs", (unquantized, "select_unquantized_moe_backend"))
    select = unquantized.select_unquantized_moe_backend

    def select_without_adapters(moe_config: Any) -> Any:
        moe_config.is_lora_enabled = False
        return select(moe_config)

    unquantized.select_unquantized_moe_backend = select_without_adapters
