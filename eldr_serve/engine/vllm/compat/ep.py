"""Expert parallelism on CPUs inside vLLM's MoE layers, in its workers. Checked on vLLM 0.32.0."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import vllm
from torch import Tensor
from vllm.config import VllmConfig, get_current_vllm_config

from eldr_serve.engine.vllm.compat.checked import (
    SUPPORTED_VLLM,
    UnsupportedEngineError,
    internal_imports,
    raise_first_refusal,
)
from eldr_serve.engine.vllm.compat.ep_ranks import OwnChoices, RankDispatch, begin_forward, rank_batches
from eldr_serve.engine.vllm.config import CONFIG_KEY
from eldr_serve.engine.vllm.ep.layer import LayerExperts
from eldr_serve.engine.vllm.ep.live import LiveExperts
from eldr_serve.engine.vllm.ep.transfer import start_layer
from eldr_serve.engine.vllm.experts_config import CpuExpertsConfig, parse_experts_config
from eldr_serve.experts.expert_placement import Topology

with internal_imports():
    from vllm.distributed import get_ep_group
    from vllm.distributed.parallel_state import get_node_count
    from vllm.model_executor.custom_op import op_registry_oot
    from vllm.model_executor.layers.fused_moe.modular_kernel import FusedMoEKernel
    from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
    from vllm.platforms import current_platform


def register_layers() -> None:
    """Make vLLM use the classes below instead of its own, through its out-of-tree registration.

    Raises:
        UnsupportedEngineError: vLLM is not the checked version, or does not run on a CPU.
    """
    if vllm.__version__.split("+")[0] != SUPPORTED_VLLM:
        raise UnsupportedEngineError(
            f"expert parallelism on CPUs was checked on vLLM {SUPPORTED_VLLM} and not on {vllm.__version__}; "
            "unset ELDR_EXPERT_PARALLEL"
        )
    if not current_platform.is_cpu():
        raise UnsupportedEngineError(
            "ELDR_EXPERT_PARALLEL is for CPUs; on GPUs vLLM has its own expert parallelism: unset it"
        )
    for base, subclass in ((UnquantizedFusedMoEMethod, PlacedMoEMethod), (MoERunner, PlacedMoERunner)):
        if base.__name__ not in op_registry_oot:
            base.register_oot(subclass, name=base.__name__)


class PlacedMoERunner(MoERunner):
    """vLLM's MoE layer as one opaque operator for the compiler, since the layer's sizes depend on the data.

    With `gather: before-top-k` it routes the tokens of all data-parallel ranks.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        use_ep = self.moe_config.moe_parallel_config.use_ep
        if use_ep and not isinstance(self._quant_method, PlacedMoEMethod):
            raise UnsupportedEngineError(
                f"expert parallelism on CPUs does not support {type(self._quant_method).__name__}: "
                "use experts that are not quantised"
            )
        vllm_config = get_current_vllm_config()
        self._gathers_first = use_ep and _gathers_before_top_k(vllm_config)
        if self._gathers_first:
            self.own_choices = OwnChoices(self.router)
            self._begins = self.layer_name == vllm_config.compilation_config.static_all_moe_layers[0]

    def _select_forward(self) -> Any:
        if not self.moe_config.moe_parallel_config.use_ep:
            return super()._select_forward()
        ops = torch.ops.vllm
        return ops.moe_forward if self._shared_experts is None else ops.moe_forward_shared

    def _forward_impl(
        self,
        hidden_states: Tensor,
        router_logits: Tensor,
        shared_experts_input: Tensor | None,
        input_ids: Tensor | None = None,
    ) -> Any:
        """Compute the layer for this rank's tokens; see vLLM's class."""
        if not self._gathers_first:
            return super()._forward_impl(hidden_states, router_logits, shared_experts_input, input_ids)
        batches = rank_batches()
        if self._begins:
            begin_forward(len(hidden_states))
        if not any(batches.sizes):  # there is nothing to gather, and routers need a token
            return super()._forward_impl(hidden_states, router_logits, shared_experts_input, input_ids)
        parts = [hidden_states]
        if self.gate is None:  # the model has computed the logits; otherwise they are computed below
            parts.append(router_logits)
        if input_ids is not None:
            parts.append(input_ids[:, None])
        gathered, *others = batches.gather(*parts)
        ids = None if input_ids is None else others.pop()[:, 0]
        logits = others.pop() if others else gathered
        result: Any = super()._forward_impl(gathered, logits, shared_experts_input, ids)
        shared, routed = result if isinstance(result, tuple) else (None, result)
        own = len(batches.select_own(gathered))
        output = torch.zeros_like(hidden_states)  # the hidden states may end with padding
        output[:own] = routed[:own]
        return output if shared is None else (shared, output)


class PlacedMoEMethod(UnquantizedFusedMoEMethod):
    """vLLM's unquantised experts; with expert parallelism a rank computes only its own slots."""

    def __init__(self, moe: Any) -> None:
        super().__init__(moe)
        if moe.moe_parallel_config.use_ep:
            vllm_config = get_current_vllm_config()
            _check_supported(vllm_config, moe)
            self._gathers_first = _gathers_before_top_k(vllm_config)
            self.experts_cls: Any = _limit_to_own_slots(self.experts_cls, vllm_config)
            # Names of the MoE layers in the model's order.
            self._layer_names = vllm_config.compilation_config.static_all_moe_layers
            self._runners = vllm_config.compilation_config.static_forward_context

    def _init_moe_kernel(self, layer: Any) -> None:
        """Make vLLM's kernel; with data parallelism, replace its token exchange, which fails on CPUs."""
        super()._init_moe_kernel(layer)
        if self.moe.use_ep and self.moe.dp_size > 1:
            runner = self._runners[layer.layer_name]
            raise_first_refusal(
                "gather: before-top-k",
                (
                    self._gathers_first and not isinstance(runner, PlacedMoERunner),
                    f"layers of type {type(runner).__name__}: leave gather out",
                ),
            )
            begins = not self._gathers_first and layer.layer_name == self._layer_names[0]
            dispatch = RankDispatch(begins=begins, gathers=not self._gathers_first)
            kernel: Any = self.moe_kernel  # type: ignore[has-type]
            self.moe_kernel = FusedMoEKernel(dispatch, kernel.fused_experts)


def live_experts(vllm_config: VllmConfig, called_together: bool) -> LiveExperts:
    """Return the experts of a worker's model; raise ValueError if they cannot be moved.

    Args:
        called_together: whether data-parallel ranks are called together; other ranks always are.
    """
    layers = list(_find_layers(vllm_config))
    if not layers:
        raise ValueError(
            "this engine's experts cannot be moved: it does not run eldr-serve's expert parallelism"
        )
    called_together |= vllm_config.parallel_config.data_parallel_size == 1
    moves = _parse_config(vllm_config).moves_per_slice
    return LiveExperts(layers, moves, get_ep_group().cpu_group, called_together=called_together)


def _find_layers(vllm_config: VllmConfig) -> Iterator[LayerExperts]:
    context = vllm_config.compilation_config.static_forward_context
    for name in vllm_config.compilation_config.static_all_moe_layers:
        kernel = getattr(context[name].routed_experts.quant_method, "moe_kernel", None)
        layer_experts = getattr(getattr(kernel, "fused_experts", None), "layer_experts", None)
        if layer_experts is not None:
            yield layer_experts


def _parse_config(vllm_config: VllmConfig) -> CpuExpertsConfig:
    return parse_experts_config(CpuExpertsConfig, (vllm_config.additional_config or {}).get(CONFIG_KEY, {}))


def _gathers_before_top_k(vllm_config: VllmConfig) -> bool:
    """Return whether data-parallel ranks gather their tokens before top-k.

    Raises:
        UnsupportedEngineError: the configuration is invalid, or the engine has no data-parallel ranks.
    """
    gathers_first = _parse_config(vllm_config).gather == "before-top-k"
    raise_first_refusal(
        "gather: before-top-k",
        (
            gathers_first and vllm_config.parallel_config.data_parallel_size == 1,
            "an engine without data-parallel ranks, since its ranks have all tokens: leave gather out",
        ),
    )
    return gathers_first


def _check_supported(vllm_config: VllmConfig, moe: Any) -> None:
    parallel = vllm_config.parallel_config
    experts, ranks = moe.num_experts, moe.moe_parallel_config.ep_size
    raise_first_refusal(
        "expert parallelism on CPUs",
        (parallel.pipeline_parallel_size > 1, "pipeline parallelism: ranks must have all layers"),
        (
            moe.is_sequence_parallel,
            "data-parallel ranks that are tensor-parallel too: set tensor_parallel_size to 1",
        ),
        (experts % ranks > 0, f"{experts} experts on {ranks} ranks: the ranks must divide the experts"),
        (vllm_config.speculative_config is not None, "speculative decoding"),
    )


def _limit_to_own_slots(kernel: Any, vllm_config: VllmConfig) -> Any:
    """Return a subclass of a kernel that computes only the (token, expert) pairs of this rank."""

    class Placed(kernel):
        layer_experts: LayerExperts

        def process_weights_after_loading(self, layer: Any) -> None:
            super().process_weights_after_loading(layer)
            group = get_ep_group()
            names = vllm_config.compilation_config.static_all_moe_layers
            sequences = vllm_config.scheduler_config.max_num_seqs
            self.layer_experts = start_layer(
                [weight for name, weight in layer.named_parameters() if name.startswith(("w13_", "w2_"))],
                _parse_config(vllm_config),
                layer=names.index(layer.layer_name),
                num_layers=len(names),
                num_experts=self.moe_config.num_experts,
                topology=Topology(ranks=group.world_size, nodes=get_node_count()),
                rank=group.rank_in_group,
                group=group.cpu_group,
                max_decode_tokens=sequences * vllm_config.parallel_config.data_parallel_size,
            )

        def apply(
            self,
            output: Tensor,
            hidden_states: Tensor,
            w1: Tensor,
            w2: Tensor,
            topk_weights: Tensor,
            topk_ids: Tensor,
            **others: Any,
        ) -> None:
            sizes = rank_batches().sizes if self.moe_config.dp_size > 1 else None
            local = self.layer_experts.route_and_log(topk_ids, sizes)
            token, column = (local >= 0).nonzero(as_tuple=True)
            output.zero_()
            if not len(token):
                return
            rows = output.new_empty(len(token), output.shape[1])
            # Give the kernel one row with one expert per pair, so that it computes no other pairs.
            super().apply(
                output=rows,
                hidden_states=hidden_states[token],
                w1=w1,
                w2=w2,
                topk_weights=topk_weights[token, column][:, None],
                topk_ids=local[token, column][:, None].int(),
                **others,
            )
            output.index_add_(0, token, rows)

    Placed.__name__ = f"Placed{kernel.__name__}"
    return Placed
