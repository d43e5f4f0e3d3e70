"""The cached blocks of prompts and answers, derived from vLLM's KV events in its engine core.

vLLM names a block by a hash, which depends on vLLM's seed and algorithm. The block's id here
(`scheduling.prefixes.block_id`) is therefore derived from the block's tokens and the id of the block before.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from vllm.config import VllmConfig

from eldr_serve.engine.vllm.compat.kv_cache import counted_group
from eldr_serve.engine.vllm.compat.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventPublisher,
    collect_events,
)
from eldr_serve.scheduling.prefixes import BlockChanges, TrackedBlocks, block_id, first_parent

_MAX_REPORTED_BLOCKS = 2**18  # maximum blocks of an engine; they take some 25 MB in the router


class PrefixEvents(EventPublisher):
    """Receives KV events in place of vLLM's publisher, and keeps the ids of the cached blocks.

    Blocks that depend on more than tokens and a cache salt (a LoRA adapter, images, prompt embeddings) have
    no id. Neither have the blocks that follow them, so no prompt can match them.

    Args:
        group: index of the KV cache group whose blocks count; other groups free blocks earlier.
        block_tokens: tokens in a block of this group.
    """

    def __init__(self, group: int, block_tokens: int) -> None:
        super().__init__()
        self._group = group
        self._block_tokens = block_tokens
        self._ids: dict[Any, bytes] = {}  # vLLM's hash of a block -> our id
        self._copies: dict[Any, int] = {}  # blocks with equal content, which requests computed concurrently
        self._tracked = TrackedBlocks()

    def publish(self, events: Any) -> None:
        """Apply a KVEventBatch."""
        for event in events.events:
            if isinstance(event, AllBlocksCleared):
                self._ids.clear()
                self._copies.clear()
                self._tracked.clear()
            elif event.group_idx != self._group:
                continue
            elif isinstance(event, BlockStored):
                self._store(event)
            elif isinstance(event, BlockRemoved):
                self._remove(event)

    def shutdown(self) -> None:
        """Do nothing: there is nothing to close."""

    def take_changes(self) -> BlockChanges | None:
        """Return the changes since the last call; None if there are none."""
        return self._tracked.take_changes()

    def _store(self, event: BlockStored) -> None:
        size = self._block_tokens
        hashes = event.block_hashes
        if event.lora_name is not None or len(event.token_ids) != size * len(hashes):
            return  # a LoRA adapter's blocks, or a part of a block
        keys = event.extra_keys or [None] * len(hashes)
        parent = self._ids.get(event.parent_block_hash)
        if event.parent_block_hash is None:
            parent, keys = _first_parent(keys[0]), [None, *keys[1:]]
        tokens = np.array(event.token_ids, np.uint32).tobytes()
        for number, (name, key) in enumerate(zip(hashes, keys, strict=True)):
            if parent is None or key is not None:
                return
            parent = block_id(parent, tokens[4 * size * number : 4 * size * (number + 1)])
            self._copies[name] = self._copies.get(name, 0) + 1
            if name not in self._ids:
                self._ids[name] = parent
                self._tracked.add(parent)

    def _remove(self, event: BlockRemoved) -> None:
        for name in event.block_hashes:
            copies = self._copies.pop(name, 0)
            if copies > 1:
                self._copies[name] = copies - 1
            elif copies:
                self._tracked.remove(self._ids.pop(name))


def prefix_events(vllm_config: VllmConfig, kv_cache_config: Any, *, log_stats: bool) -> PrefixEvents | None:
    """Make a new scheduler collect KV events, and return their receiver; None if nobody needs them.

    The router needs the events of an engine that prefills and decodes and has a prefix cache. The changes
    reach the replica with vLLM's statistics. The router estimates the prefix cache itself if the engine
    collects no statistics, or if it has its own `kv_events_config`, data-parallel ranks (whose caches are
    separate) or too many blocks.
    """
    cache = vllm_config.cache_config
    transfer = vllm_config.kv_transfer_config
    if (
        not log_stats
        or not cache.enable_prefix_caching
        or transfer is None
        or transfer.kv_role != "kv_both"
        or vllm_config.kv_events_config is not None
        or vllm_config.parallel_config.data_parallel_size > 1
        or kv_cache_config.num_blocks > _MAX_REPORTED_BLOCKS
    ):
        return None
    group = counted_group(vllm_config, kv_cache_config)
    if group.block_size != cache.block_size:
        return None
    collect_events(vllm_config)
    return PrefixEvents(group.index, group.block_size)


def _first_parent(keys: tuple[Any, ...] | None) -> bytes | None:
    """Return the parent of a prompt's first block with these extra keys; None if the block has no id."""
    if keys is None:
        return first_parent("")
    # Without an adapter, a string is the cache salt. Images have pairs as keys, prompt embeddings have bytes.
    return first_parent(keys[0]) if len(keys) == 1 and isinstance(keys[0], str) else None
