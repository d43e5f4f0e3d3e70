"""Loads of the decode workers as the router knows them, for predictions of latency in the ingresses."""

from __future__ import annotations

import math

from eldr_serve.router.state import RouterState
from eldr_serve.scheduling import DecodeLoads, PromptBlocks


def decode_loads(state: RouterState, blocks: PromptBlocks | None) -> DecodeLoads:
    """Return the loads of all live workers.

    Args:
        blocks: blocks of the prompt in question if the worker computes it too.
    """
    prompt_tokens = state.counters["prefill_tokens"]
    cached_tokens = state.counters["prefill_tokens_cached"]
    return DecodeLoads(
        state.placer.worker_loads(blocks),
        state.queue_size,
        state.costs.load(math.prod(state.check.shape or (0,))),
        cached_tokens / max(prompt_tokens, 1),
    )
