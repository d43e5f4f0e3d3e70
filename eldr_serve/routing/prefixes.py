"""Which worker has computed which prefix: what was sent where, as far as it is likely to be kept.

A prompt is cut into the blocks of the engines' KV cache. A block's hash is of its tokens and of all before
them, so equal hashes are equal prefixes.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_USUAL_BLOCKS = 4096  # of a worker that has not said how many it holds
_MOST_BLOCKS = 2**16  # that are remembered of a worker, some 8 MB
_HASH_BYTES = 8


@dataclass(frozen=True, eq=False)
class PromptBlocks:
    """The full blocks of a prompt that a cache can spare; the last token is always computed.

    Attributes:
        hashes: uint64[n], in the prompt's order.
        block_tokens: tokens of a block.
    """

    hashes: NDArray[np.uint64]
    block_tokens: int


def prompt_blocks(token_ids: NDArray[np.uint32], block_tokens: int, salt: str = "") -> PromptBlocks:
    """The blocks of a prompt.

    Args:
        token_ids: uint32[T].
        block_tokens: of the engines' KV cache; 0 if they share no prefixes, and there are no blocks.
        salt: of the request's `cache_salt`; prompts of different salts share nothing.
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
    """Blocks that one worker has computed, the most recently used ones.

    A block is used whenever one that follows it is, and after it. So it is never forgotten before those that
    follow it, and the blocks of a prompt that are known are its first ones.

    Args:
        blocks: that are kept at most.
    """

    def __init__(self, blocks: int = _USUAL_BLOCKS) -> None:
        self.room = blocks
        self._used: OrderedDict[int, None] = OrderedDict()  # oldest first

    def __len__(self) -> int:
        return len(self._used)

    def hit(self, hashes: Sequence[int]) -> int:
        """How many of a prompt's blocks are known."""
        if not hashes or hashes[0] not in self._used:
            return 0
        return bisect_left(hashes, True, key=lambda block: block not in self._used)

    def use(self, hashes: Sequence[int]) -> None:
        """A prompt of these blocks is computed here; of one too long for the cache its first blocks stay."""
        used = self._used
        for block in reversed(hashes[: self.room]):
            used[block] = None
            used.move_to_end(block)
        self.fit(self.room)

    def fit(self, blocks: int) -> None:
        """From now on so many are kept."""
        self.room = blocks
        while len(self._used) > blocks:
            self._used.popitem(last=False)


class PrefixMap:
    """A PrefixCache of each worker, by any hashable name, as far as the worker's own cache can be foreseen.

    What an engine evicts otherwise, and blocks that end within an answer, are not known here.
    """

    def __init__(self) -> None:
        self._caches: dict[Hashable, PrefixCache] = {}
        self._room: dict[Hashable, int] = {}

    def __len__(self) -> int:
        """Blocks that are remembered, of all workers."""
        return sum(map(len, self._caches.values()))

    def keep(self, workers: Iterable[Hashable]) -> None:
        """Forget all others: a worker that starts again has another name, or none in between."""
        kept = set(workers)
        for known in (self._caches, self._room):
            for gone in [worker for worker in known if worker not in kept]:
                del known[gone]

    def holds(self, worker: Hashable, kv_tokens: int, block_tokens: int) -> None:
        """The worker's KV cache holds so many tokens, in blocks of that size."""
        room = min(max(kv_tokens // block_tokens, 1), _MOST_BLOCKS)
        self._room[worker] = room
        if worker in self._caches:
            self._caches[worker].fit(room)

    def sent(self, worker: Hashable, blocks: PromptBlocks) -> None:
        """The worker computes a prompt of these blocks, or has computed them before."""
        if not len(blocks.hashes):
            return
        cache = self._caches.get(worker)
        if cache is None:
            cache = self._caches[worker] = PrefixCache(self._room.get(worker, _USUAL_BLOCKS))
        cache.use(blocks.hashes.tolist())

    def cached_tokens(self, workers: Sequence[Hashable], blocks: PromptBlocks) -> NDArray[np.int64]:
        """int64[W], tokens of the prompt that each worker need not compute."""
        hashes = blocks.hashes.tolist()
        caches = map(self._caches.get, workers)
        hits = [0 if cache is None else cache.hit(hashes) for cache in caches]
        return np.array(hits, np.int64) * blocks.block_tokens
