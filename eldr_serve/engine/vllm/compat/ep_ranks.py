"""The exchange that gives each data-parallel rank of a CPU engine the tokens of all ranks.

vLLM's own exchange needs operations that its communicator for CPUs lacks. Checked on vLLM 0.32.0.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from eldr_serve.engine.vllm.compat.checked import internal_imports
from eldr_serve.engine.vllm.ep.exchange import RankBatches

with internal_imports():
    from vllm.distributed import get_ep_group
    from vllm.forward_context import get_forward_context
    from vllm.model_executor.layers.fused_moe.modular_kernel import (
        FusedMoEActivationFormat,
        FusedMoEPrepareAndFinalizeModular,
    )


@cache
def rank_batches() -> RankBatches:
    """Return the exchange of this process's rank, which all MoE layers share."""
    return RankBatches(get_ep_group().cpu_group)


def begin_forward(tokens: int) -> None:
    """Begin a forward of this rank in its first MoE layer; ignore the tokens of a rank without requests."""
    idle = get_forward_context().attn_metadata is None
    rank_batches().begin(0 if idle else tokens)


class OwnChoices:
    """The router of a layer that routes the tokens of all ranks; only this rank's choices are captured.

    Args:
        router: vLLM's router of the layer.
    """

    def __init__(self, router: Any) -> None:
        self.top_k, self.global_num_experts = router.top_k, router.global_num_experts
        self._router = router

    def set_capture_fn(self, capture_fn: Callable[[Tensor], None] | None) -> None:
        """Pass the choices of this rank's tokens, int[T, k], to a callback; the interface of BaseRouter."""
        if capture_fn is None:
            self._router.set_capture_fn(None)
        else:
            self._router.set_capture_fn(lambda experts: capture_fn(rank_batches().select_own(experts)))


class RankDispatch(FusedMoEPrepareAndFinalizeModular):
    """A dispatch that gathers the tokens of all ranks before a layer's experts, and then sums up the results.

    A rank without requests runs its steps with a dummy token, so that other ranks need not wait. The exchange
    leaves the dummy token out, so it activates no expert.

    Args:
        begins: whether a forward begins in this dispatch, since its layer is the model's first MoE layer.
        gathers: whether this dispatch gathers the tokens; False: they were gathered before top-k.
    """

    def __init__(self, *, begins: bool, gathers: bool = True) -> None:
        super().__init__()
        self._begins, self._gathers = begins, gathers

    @property
    def activation_format(self) -> Any:
        return FusedMoEActivationFormat.Standard

    def topk_indices_dtype(self) -> torch.dtype | None:
        return None

    def max_num_tokens_per_rank(self) -> int | None:
        return None

    def num_dispatchers(self) -> int:
        return rank_batches().ranks

    def output_is_reduced(self) -> bool:
        return True

    def prepare(
        self,
        a1: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        num_experts: int,
        expert_map: Tensor | None,
        apply_router_weight_on_input: bool,
        quant_config: Any,
        defer_input_quant: bool = False,
    ) -> Any:
        """Return hidden states, experts and weights of the tokens of all ranks; see vLLM's class."""
        batches = rank_batches()
        if self._begins:
            begin_forward(len(a1))
        if apply_router_weight_on_input:  # each token has only one expert
            a1 = a1 * topk_weights.to(a1.dtype)
        parts = (a1, topk_weights, topk_ids)
        if self._gathers:
            hidden, weights, experts = batches.gather(*parts)
        else:  # only the tokens of idle ranks are left out
            hidden, weights, experts = (part[: sum(batches.sizes)] for part in parts)
        return hidden, None, None, experts, weights

    def finalize(
        self,
        output: Tensor,
        fused_expert_output: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        apply_router_weight_on_input: bool,
        weight_and_reduce_impl: Any,
    ) -> None:
        """Write the results of this rank's tokens; see vLLM's class."""
        own = rank_batches().combine(fused_expert_output)
        # vLLM may have taken `output` as the experts' buffer, so that both overlap.
        output[: len(own)] = own.clone()
        output[len(own) :] = 0
