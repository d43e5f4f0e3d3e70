"""A model of the workers' prefix caches, based on the prompts that were sent to each worker.

A prompt is split into the blocks of the engines' KV cache. The hash of a block covers its tokens and all
tokens before it, so equal hashes mean equal prefixes.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_DEFAULT_BLOCKS = 4096  # capacity of a worker that has not reported it
_MAX_BLOCKS = 2**16  # limit per worker, some 8 MB
_HASH_BYTES = 8


@dataclass(frozen=True, eq=False)
class PromptBlocks:
    """The full blocks of a prompt that a cache can hold; the last token is always computed.

    Attributes:
        hashes: uint64[n], in the prompt's order.
        block_tokens: tokens per block.
    """

    hashes: NDArray[np.uint64]
    block_tokens: int


def prompt_blocks(token_ids: NDArray[np.uint32], block_tokens: int, salt: str = "") -> PromptBlocks:
    """Return the blocks of a prompt.

    Args:
        token_ids: uint32[T].
        block_tokens: block size of the engines' KV cache; 0 without prefix caching gives no blocks.
        salt: the request's `cache_salt`; prompts with different salts share no blocks.
    """
    if not block_tokens:
        return PromptBlocks(np.zeros(0, np.uint64), 0)
    size = token_ids.itemsize * block_tokens
    content = token_ids.tobytes()
    chain = hashlib.blake2b(salt.encode(errors="surrogatepass"), digest_size=_HASH_BYTES)
    hashes = []
    for end in range(size, len(content) - token_ids.itemsize + 1, size):
        chain.update(content[end - size : end])
        hashes.append(chain.copy().digest())
    return PromptBlocks(np.frombuffer(b"".join(hashes), np.uint64), block_tokens)


class PrefixCache:
    """LRU set of the blocks that one worker has computed.

    Using a prompt touches its later blocks first, so a block is never evicted before those that follow it,
    and the cached blocks of a prompt are always its first ones.

    Args:
        blocks: capacity.
    """

    def __init__(self, blocks: int = _DEFAULT_BLOCKS) -> None:
        self.capacity = blocks
        self._used: OrderedDict[int, None] = OrderedDict()  # oldest first

    def __len__(self) -> int:
        return len(self._used)

    def hit(self, hashes: Sequence[int]) -> int:
        """Return the number of a prompt's blocks in the cache."""
        if not hashes or hashes[0] not in self._used:
            return 0
        return bisect_left(hashes, True, key=lambda block: block not in self._used)

    def use(self, hashes: Sequence[int]) -> None:
        """Add the blocks of a prompt; if it exceeds the capacity, only its first blocks."""
        used = self._used
        for block in reversed(hashes[: self.capacity]):
            used[block] = None
            used.move_to_end(block)
        self.resize(self.capacity)

    def resize(self, blocks: int) -> None:
        """Change the capacity; evict the oldest blocks beyond it."""
        self.capacity = blocks
        while len(self._used) > blocks:
            self._used.popitem(last=False)


class PrefixMap:
    """One PrefixCache per worker, by any hashable name; an estimate of the worker's own cache.

    Other evictions of the engine, and blocks that end within an answer, are unknown here.
    """

    def __init__(self) -> None:
        self._caches: dict[Hashable, PrefixCache] = {}
        self._capacity: dict[Hashable, int] = {}

    def __len__(self) -> int:
        """Return the number of blocks of all workers."""
        return sum(map(len, self._caches.values()))

    def keep(self, workers: Iterable[Hashable]) -> None:
        """Remove all other workers; a restarted worker has another name, or is absent in between."""
        kept = set(workers)
        for by_worker in (self._caches, self._capacity):
            for worker in by_worker.keys() - kept:
                del by_worker[worker]

    def set_capacity(self, worker: Hashable, kv_tokens: int, block_tokens: int) -> None:
        """Set the capacity of a worker's KV cache, in tokens, and its block size."""
        capacity = min(max(kv_tokens // block_tokens, 1), _MAX_BLOCKS)
        self._capacity[worker] = capacity
        if worker in self._caches:
            self._caches[worker].resize(capacity)

    def record_prompt(self, worker: Hashable, blocks: PromptBlocks) -> None:
        """Record that a prompt of these blocks was sent to the worker."""
        if not len(blocks.hashes):
            return
        cache = self._caches.get(worker)
        if cache is None:
            cache = self._caches[worker] = PrefixCache(self._capacity.get(worker, _DEFAULT_BLOCKS))
        cache.use(blocks.hashes.tolist())

    def cached_tokens(self, workers: Sequence[Hashable], blocks: PromptBlocks) -> NDArray[np.int64]:
        """Return the number of prompt tokens that each worker has cached, int64[W]."""
        hashes = blocks.hashes.tolist()
        caches = map(self._caches.get, workers)
        hits = [0 if cache is None else cache.hit(hashes) for cache in caches]
        return np.array(hits, np.int64) * blocks.block_tokens
