"""The contents of the workers' prefix caches, reported by engines or estimated from the prompts.

A prompt is split into the blocks of the engines' KV cache. The id of a block is a hash of its tokens, all
tokens before it and the salt, so equal ids mean equal prefixes.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

_DEFAULT_BLOCKS = 4096  # capacity of a worker that has not reported it
_MAX_EXPECTED_BLOCKS = 2**16  # limit of a worker's blocks that no engine has reported, about 8 MB
_HASH_BYTES = 8
_UNCONFIRMED_REPORTS = 60  # a prompt is forgotten after so many reports without its blocks


def first_parent(salt: str) -> bytes:
    """Return the parent, for `block_id`, of the first block of a prompt with this `cache_salt`."""
    return hashlib.blake2b(salt.encode(errors="surrogatepass"), digest_size=_HASH_BYTES).digest()


def block_id(parent: bytes, tokens: bytes) -> bytes:
    """Return the id of a block, 8 bytes.

    Args:
        parent: id of the block before it, or `first_parent`.
        tokens: the block's token ids, uint32 bytes.
    """
    return hashlib.blake2b(parent + tokens, digest_size=_HASH_BYTES).digest()


@dataclass(frozen=True, eq=False)
class PromptBlocks:
    """The full blocks of a prompt that a cache can hold; the last token is always computed.

    Attributes:
        hashes: uint64[n], their ids in the prompt's order.
        block_tokens: tokens per block.
        exact: whether the engine computes the same token ids. It computes other ids for a chat, which is
            hashed without its template. The blocks of a chat can be compared with other prompts' blocks, but
            not with the blocks that an engine reports.
    """

    hashes: NDArray[np.uint64]
    block_tokens: int
    exact: bool = True


def prompt_blocks(
    token_ids: NDArray[np.uint32], block_tokens: int, salt: str = "", *, exact: bool = True
) -> PromptBlocks:
    """Return the blocks of a prompt.

    Args:
        token_ids: uint32[T].
        block_tokens: block size of the engines' KV cache; 0 without prefix caching, which gives no blocks.
        salt: the request's `cache_salt`; prompts with different salts share no blocks.
        exact: see PromptBlocks.
    """
    if not block_tokens:
        return PromptBlocks(np.zeros(0, np.uint64), 0)
    size = token_ids.itemsize * block_tokens
    content = token_ids.tobytes()
    parent, ids = first_parent(salt), []
    for end in range(size, len(content) - token_ids.itemsize + 1, size):
        parent = block_id(parent, content[end - size : end])
        ids.append(parent)
    return PromptBlocks(np.frombuffer(b"".join(ids), np.uint64), block_tokens, exact)


class PrefixCacheSize(NamedTuple):
    """The tokens in a block of a prefix cache, and in the whole cache."""

    block_tokens: int
    kv_tokens: int


@dataclass(frozen=True)
class BlockChanges:
    """Changes of the blocks in an engine's prefix cache; each id is 8 bytes.

    Attributes:
        added: ids of blocks that are cached now.
        removed: ids of blocks that are not cached now, including some that were added and removed
            since the last report.
        full: `added` has all cached blocks, and earlier reports do not count.
    """

    added: bytes = b""
    removed: bytes = b""
    full: bool = False


class TrackedBlocks:
    """A set of block ids that keeps its changes until `take_changes` returns them."""

    def __init__(self) -> None:
        self._blocks: set[bytes] = set()
        self._added: set[bytes] = set()
        self._removed: set[bytes] = set()

    def add(self, block: bytes) -> None:
        """Add a block that is cached now."""
        self._blocks.add(block)
        self._added.add(block)
        self._removed.discard(block)

    def remove(self, block: bytes) -> None:
        """Remove a block that is not cached any more."""
        self._blocks.discard(block)
        self._added.discard(block)
        self._removed.add(block)

    def clear(self) -> None:
        """Remove all blocks."""
        for block in tuple(self._blocks):
            self.remove(block)

    def apply(self, changes: BlockChanges) -> None:
        """Apply another set's changes; raise ValueError for a full report."""
        if changes.full:
            raise ValueError("changes is a full report; report only the blocks that were added and removed")
        for block in _split(changes.removed):
            self.remove(block)
        for block in _split(changes.added):
            self.add(block)

    def take_changes(self, *, full: bool = False) -> BlockChanges | None:
        """Return the changes since the last call; None if there are none.

        Args:
            full: whether to return all blocks instead, even if there are no changes.
        """
        added, removed = self._blocks if full else self._added, self._removed
        self._added, self._removed = set(), set()
        if not (full or added or removed):
            return None
        return BlockChanges(b"".join(added), b"".join(removed), full)


def _split(blocks: bytes) -> list[bytes]:
    return [blocks[start : start + _HASH_BYTES] for start in range(0, len(blocks), _HASH_BYTES)]


def _count_first_blocks(hashes: Sequence[int], is_cached: Callable[[int], bool]) -> int:
    """Return the number of a prompt's cached blocks, which are its first ones."""
    if not hashes or not is_cached(hashes[0]):
        return 0
    return bisect_left(hashes, True, key=lambda block: not is_cached(block))


class PrefixCache:
    """LRU set of the blocks that one worker has computed.

    Since the later blocks of a prompt are touched first, each block is evicted after the blocks that follow
    it. So the cached blocks of a prompt are always its first ones.

    Args:
        capacity: maximum number of blocks.
    """

    def __init__(self, capacity: int = _DEFAULT_BLOCKS) -> None:
        self.capacity = capacity
        self._used: OrderedDict[int, None] = OrderedDict()  # blocks, oldest first

    def __len__(self) -> int:
        return len(self._used)

    def count_hits(self, hashes: Sequence[int]) -> int:
        """Return the number of a prompt's blocks in the cache."""
        return _count_first_blocks(hashes, self._used.__contains__)

    def record_prompt(self, hashes: Sequence[int]) -> None:
        """Add the blocks of a prompt, or its first blocks if it exceeds the capacity."""
        used = self._used
        for block in reversed(hashes[: self.capacity]):
            used[block] = None
            used.move_to_end(block)
        self.resize(self.capacity)

    def resize(self, capacity: int) -> None:
        """Change the capacity; evict the oldest blocks beyond it."""
        self.capacity = capacity
        while len(self._used) > capacity:
            self._used.popitem(last=False)


class ReportedCache:
    """The blocks that a worker's engine has reported, and the blocks that it has yet to compute.

    A block of a prompt counts as cached as soon as the prompt is placed. If the engine does not report the
    block, because the request was cancelled or refused, the block is removed.

    Args:
        max_awaited: maximum number of blocks that are yet to be computed; the oldest are removed.
    """

    def __init__(self, max_awaited: int = _DEFAULT_BLOCKS) -> None:
        self._max_awaited = max_awaited
        self._cached: set[int] = set()
        self._awaited: OrderedDict[int, int] = OrderedDict()  # number of the last report; oldest first
        self._placed: set[int] = set()  # blocks of the prompts since the last report
        self._reports = 0

    def __len__(self) -> int:
        return len(self._cached) + len(self._awaited)

    @property
    def num_reported(self) -> int:
        """Return the number of cached blocks according to the engine's reports."""
        return len(self._cached)

    def count_hits(self, hashes: Sequence[int]) -> int:
        """Return the number of a prompt's blocks in the cache.

        The cached blocks of a prompt are its first ones, since engines evict the last ones first.
        """
        return _count_first_blocks(hashes, lambda block: block in self._cached or block in self._awaited)

    def record_prompt(self, hashes: Sequence[int]) -> None:
        """Record that the engine will have the blocks of a prompt."""
        self._placed.update(hashes)
        for block in reversed(hashes):
            if block not in self._cached:
                self._awaited[block] = self._reports
                self._awaited.move_to_end(block)
        self._trim()

    def set_max_awaited(self, max_awaited: int) -> None:
        """Change the maximum number of blocks that are yet to be computed."""
        self._max_awaited = max_awaited
        self._trim()

    def apply(self, changes: BlockChanges) -> None:
        """Apply a report of the engine.

        If a prompt was placed since the last report, the engine will compute the prompt's removed blocks
        again. It evicted them before it got the prompt, because it evicts no block of a running request.
        """
        added, removed = (
            set(np.frombuffer(ids, np.uint64).tolist()) for ids in (changes.added, changes.removed)
        )
        if changes.full:
            removed |= self._cached - added
        self._cached.difference_update(removed)
        self._cached.update(added)
        for block in added:
            self._awaited.pop(block, None)
        for block in removed:
            if block in self._placed:
                self._awaited[block] = self._reports
                self._awaited.move_to_end(block)
            else:
                self._awaited.pop(block, None)
        self._placed.clear()
        self._reports += 1
        self._trim()

    def _trim(self) -> None:
        """Remove awaited blocks that exceed the maximum, or that too many reports did not contain."""
        while len(self._awaited) > self._max_awaited:
            self._awaited.popitem(last=False)
        newest_expired = self._reports - _UNCONFIRMED_REPORTS
        while self._awaited and next(iter(self._awaited.values())) <= newest_expired:
            self._awaited.popitem(last=False)


class PrefixMap:
    """The prefix caches of all workers, whose names are any hashable values.

    A worker whose engine reports its blocks has a ReportedCache for the prompts whose ids are exact. For
    other prompts and workers a PrefixCache estimates the cache. The estimate knows neither other evictions of
    the engine nor blocks that end within an answer.
    """

    def __init__(self) -> None:
        self._caches: dict[Hashable, PrefixCache] = {}
        self._reported: dict[Hashable, ReportedCache] = {}
        self._capacity: dict[Hashable, int] = {}

    def __len__(self) -> int:
        """Return the number of blocks of all workers."""
        return sum(map(len, self._caches.values())) + sum(map(len, self._reported.values()))

    def keep_only(self, workers: Iterable[Hashable]) -> None:
        """Remove all workers but these; a restarted worker has another name, or is absent in between."""
        names = set(workers)
        for by_worker in (self._caches, self._reported, self._capacity):
            for worker in by_worker.keys() - names:
                del by_worker[worker]

    def set_capacity(self, worker: Hashable, kv_tokens: int, block_tokens: int) -> None:
        """Set the capacity of a worker's KV cache, in tokens, and its block size."""
        capacity = min(max(kv_tokens // block_tokens, 1), _MAX_EXPECTED_BLOCKS)
        self._capacity[worker] = capacity
        if worker in self._caches:
            self._caches[worker].resize(capacity)
        if worker in self._reported:
            self._reported[worker].set_max_awaited(capacity)

    def report(self, worker: Hashable, changes: BlockChanges | None) -> bool:
        """Apply a report of a worker's engine; return whether all of its blocks are known.

        Changes of a worker whose blocks are unknown (this process is new, or has missed a report) are
        ignored until a full report.

        Args:
            changes: None: no changes, or the engine reports none.
        """
        cache = self._reported.get(worker)
        if cache is None:
            if changes is None or not changes.full:
                return False
            cache = self._reported[worker] = ReportedCache(self._capacity.get(worker, _DEFAULT_BLOCKS))
        cache.apply(changes or BlockChanges())  # without changes, prompts come closer to being forgotten
        return True

    def reported_blocks(self, worker: Hashable) -> int | None:
        """Return the number of blocks that a worker's engine has reported; None without reports."""
        cache = self._reported.get(worker)
        return None if cache is None else cache.num_reported

    def record_prompt(self, worker: Hashable, blocks: PromptBlocks) -> None:
        """Record that a prompt of these blocks was sent to the worker."""
        if not len(blocks.hashes):
            return
        cache = self._cache(worker, blocks)
        if cache is None:
            cache = self._caches[worker] = PrefixCache(self._capacity.get(worker, _DEFAULT_BLOCKS))
        cache.record_prompt(blocks.hashes.tolist())

    def _cache(self, worker: Hashable, blocks: PromptBlocks) -> PrefixCache | ReportedCache | None:
        reported = self._reported.get(worker) if blocks.exact else None
        return self._caches.get(worker) if reported is None else reported

    def cached_tokens(self, workers: Sequence[Hashable], blocks: PromptBlocks) -> NDArray[np.int64]:
        """Return the number of prompt tokens that each worker has cached, int64[W]."""
        hashes = blocks.hashes.tolist()
        caches = [self._cache(worker, blocks) for worker in workers]
        hits = [0 if cache is None else cache.count_hits(hashes) for cache in caches]
        return np.array(hits, np.int64) * blocks.block_tokens
