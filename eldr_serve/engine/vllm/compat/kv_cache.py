"""The group of vLLM's KV cache that is counted, and the KV slots of a step's tokens.

The engine core and the workers choose the group; workers find the slots.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor
from vllm.config import VllmConfig

from eldr_serve.engine.vllm.compat.checked import UnsupportedEngineError, check_names, internal_imports

with internal_imports():
    from vllm.forward_context import ForwardContext, get_forward_context, is_forward_context_available
    from vllm.v1.core import kv_cache_utils
    from vllm.v1.kv_cache_interface import KVCacheConfig, SlidingWindowSpec, is_full_attention_spec

from eldr_serve.scheduling.prefixes import PrefixCacheSize


@dataclass(frozen=True)
class CountedGroup:
    """The KV cache group in whose blocks tokens are counted.

    Attributes:
        index: index of the group in the engine.
        block_size: tokens per block.
        layer: name of one of the group's layers.
    """

    index: int
    block_size: int
    layer: str


def counted_group(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> CountedGroup:
    """Return the group whose blocks hold all tokens of a prompt until it ends: a full-attention group.

    Groups of sliding windows, chunks and recurrent states free blocks earlier, or hold a state instead of
    tokens.

    Raises:
        UnsupportedEngineError: the engine has no such group, or a prefix hit could end within a block of
            the group. The counts of the tokens after such a hit could not be separated.
    """
    for index, group in enumerate(kv_cache_config.kv_cache_groups):
        spec = group.kv_cache_spec
        complete = is_full_attention_spec(spec) or (
            isinstance(spec, SlidingWindowSpec)
            and spec.sliding_window >= vllm_config.model_config.max_model_len
        )
        if complete and not group.host_resident:
            _check_whole_hits(vllm_config, kv_cache_config, spec.block_size)
            return CountedGroup(index, spec.block_size, group.layer_names[0])
    kinds = ", ".join(type(group.kv_cache_spec).__name__ for group in kv_cache_config.kv_cache_groups)
    raise UnsupportedEngineError(
        f"the ELDR connector does not support a KV cache without full attention ({kinds}): blocks are freed "
        "before their prompt ends; set max_model_len to at most the sliding window, if the model has one"
    )


def _check_whole_hits(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, block_size: int) -> None:
    cache = vllm_config.cache_config
    if not cache.enable_prefix_caching or len(kv_cache_config.kv_cache_groups) == 1:
        return
    _, unit = kv_cache_utils.resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)
    if unit % block_size and kv_cache_utils.partial_hash_hits_enabled(kv_cache_config.kv_cache_groups, unit):
        unset = cache.prefix_match_unit is None
        remedy = "set enable_prefix_caching to false" if unset else "leave prefix_match_unit out"
        raise UnsupportedEngineError(
            f"the ELDR connector does not support prefix hits that end within a block ({unit} tokens of a "
            f"block's {block_size}): {remedy}"
        )


def forward_slots(layer: str) -> Tensor | None:
    """Return int64[T], the layer's KV slot of each token of the next forward; None without a forward context.

    Both of vLLM's model runners bind a step's metadata to the connector within the forward's context, except
    when Model Runner V2 replays a full CUDA graph: see `graph_slots`.
    """
    if not is_forward_context_available():
        return None
    slots = get_forward_context().slot_mapping
    if isinstance(slots, list):
        raise UnsupportedEngineError("the ELDR connector does not support micro-batches")
    layer_slots: Tensor | None = slots.get(layer)
    return layer_slots


def graph_slots(load_kwargs: dict[str, Any], layer: str) -> Tensor | None:
    """Return int64[T], a layer's KV slots, from what Model Runner V2 passes to `start_load_kv`, or None."""
    attention = (load_kwargs.get("attn_metadata") or {}).get(layer)
    slots: Tensor | None = getattr(attention, "slot_mapping", None)
    return slots


def prefix_cache(vllm_config: VllmConfig) -> PrefixCacheSize | None:
    """Return the size of a rank's prefix cache; None without prefix caching."""
    cache = vllm_config.cache_config
    if not cache.enable_prefix_caching:
        return None
    kv_tokens = cache.kv_cache_size_tokens or cache.block_size * (cache.num_gpu_blocks or 0)
    return PrefixCacheSize(cache.block_size, kv_tokens)


def check_vllm_names() -> None:
    """Raise UnsupportedEngineError if vLLM lacks a name that this module uses."""
    check_names(
        "the ELDR connector",
        (ForwardContext, "slot_mapping"),
        (kv_cache_utils, "resolve_kv_cache_block_sizes"),
        (kv_cache_utils, "partial_hash_hits_enabled"),
    )
