"""Estimate of an engine's memory: weights, working memory of a step, and the rest for the KV cache."""

from __future__ import annotations

from eldr_serve.engine.protocol import StepSizes
from eldr_serve.preflight.machine import GIB

# Fixed part, GiB: on a GPU, CUDA context, NCCL buffers and CUDA graphs; on a CPU, the engine's process.
FIXED_GIB = {"gpu": 3.0, "cpu": 2.5}
_LIVE_HIDDEN = 6  # copies of the hidden states that a layer holds at the same time
_LOGITS_COPIES = 3  # logits in float32, and the sampler's copies


def reserve_bytes(step: StepSizes, device: str) -> int:
    """Estimate the memory of one rank beside weights and KV cache, bytes; vLLM measures it at its start.

    The MoE kernel's two workspaces hold each token once per expert: T x k x max(H, I), T x k x max(H, 2I).
    With data-parallel ranks, T counts the tokens of all ranks.
    """
    copies = step.tokens * step.data_ranks * step.top_k * step.element
    moe = copies * (max(step.hidden, step.expert_width) + max(step.hidden, 2 * step.expert_width))
    hidden = _LIVE_HIDDEN * step.tokens * step.hidden * step.element
    logits = _LOGITS_COPIES * step.sequences * step.vocabulary * 4
    return round(FIXED_GIB[device] * GIB) + moe + hidden + logits


def kv_bytes(total_gib: float, utilization: float, weights: int, reserve: int) -> int:
    """Return the memory left for KV blocks, bytes; negative if weights and reserve do not fit."""
    return int(total_gib * GIB * utilization) - weights - reserve
