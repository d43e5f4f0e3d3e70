"""An engine's memory: weights, what a step needs beside them, and the KV tokens that are left."""

from __future__ import annotations

from eldr_serve.check.machine import GIB
from eldr_serve.engine.backend import Step

# By table: what no formula here gives. CUDA's context, NCCL's buffers and CUDA graphs on a GPU; an engine's
# process with its Python on a CPU.
FIXED_GIB = {"gpu": 3.0, "cpu": 2.5}
_LIVE_HIDDEN = 6  # copies of the hidden states that a layer holds at once
_LOGITS_COPIES = 3  # logits in 32 bits, and what the sampler makes of them


def reserve_bytes(step: Step, device: str) -> int:
    """An estimate of what one rank needs beside weights and KV cache; vLLM measures it at the start.

    The MoE kernel's two work areas hold each token once an expert: T x k x max(H, I) and T x k x max(H, 2I).
    """
    copies = step.tokens * step.top_k * step.element
    moe = copies * (max(step.hidden, step.expert_width) + max(step.hidden, 2 * step.expert_width))
    hidden = _LIVE_HIDDEN * step.tokens * step.hidden * step.element
    logits = _LOGITS_COPIES * step.sequences * step.vocabulary * 4
    return round(FIXED_GIB[device] * GIB) + moe + hidden + logits


def kv_bytes(total_gib: float, utilization: float, weights: int, reserve: int) -> int:
    """What is left for KV blocks, bytes; negative where even the weights do not fit."""
    return int(total_gib * GIB * utilization) - weights - reserve
