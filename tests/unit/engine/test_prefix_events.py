"""The map of cached prefixes, from events of vLLM's own cache manager, compared with the manager's hits."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.distributed.kv_events import BlockStored, KVEventBatch
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request

from eldr_serve.engine.vllm import prefix_events as module
from eldr_serve.engine.vllm.prefix_events import PrefixEvents, prefix_events
from eldr_serve.scheduling.prefixes import BlockChanges, PrefixMap, TrackedBlocks, prompt_blocks

SIZE = 4  # tokens of a block
ROOM = 12  # blocks, one of which vLLM never uses
HASH = get_hash_fn_by_name("sha256")
IMAGE = MultiModalFeatureSpec(None, "image", "cat", PlaceholderRange(offset=1, length=2))
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "salted": {"cache_salt": "salt"},
    "adapter": {"lora_request": LoRARequest("salt", 1, "/adapter")},  # its name is like the salt
    "salted adapter": {"lora_request": LoRARequest("a", 1, "/adapter"), "cache_salt": "salt"},
    "image": {"mm_features": [IMAGE]},
    "salted image": {"mm_features": [IMAGE], "cache_salt": "salt"},
}
SALTS = {"plain": "", "salted": "salt"}  # salts of the kinds whose prompts the router can describe
init_none_hash(HASH)
HASHER = get_request_block_hasher(SIZE, HASH)


def request(name: str, ids: list[int], **more: Any) -> Request:
    return Request(name, ids, SamplingParams(max_tokens=99), None, block_hasher=HASHER, **more)


class Cache:
    """vLLM's cache manager with requests, and the receiver of its events."""

    def __init__(self) -> None:
        spec = FullAttentionSpec(block_size=SIZE, num_kv_heads=1, head_size=1, dtype=torch.float32)
        config = KVCacheConfig(ROOM, [], [KVCacheGroupSpec(["layer"], spec)])
        self.manager = KVCacheManager(config, 999, SIZE, SIZE, enable_kv_cache_events=True)
        self.events = PrefixEvents(0, SIZE)
        self.running: list[Request] = []
        self.number = 0

    def count_hits(self, ids: list[int], kind: str) -> int:
        """Return the tokens that the manager finds in the cache."""
        return self.manager.get_computed_blocks(request("probe", ids, **KINDS[kind]))[1]

    def start(self, ids: list[int], kind: str) -> None:
        self.number += 1
        new = request(f"{self.number}", ids, **KINDS[kind])
        blocks, cached, _ = self.manager.get_computed_blocks(new)
        if self.manager.allocate_slots(new, len(ids) - cached, cached, blocks) is not None:
            new.num_computed_tokens = len(ids)
            self.running.append(new)

    def decode(self, token: int) -> None:
        for one in list(self.running):
            one.append_output_token_ids(token)
            if self.manager.allocate_slots(one, 1) is None:
                self.end(self.running.index(one))
            else:
                one.num_computed_tokens += 1

    def end(self, index: int) -> None:
        if self.running:
            self.manager.free(self.running.pop(index % len(self.running)))

    def clear(self) -> None:
        while self.running:
            self.end(0)
        assert self.manager.reset_prefix_cache()

    def changes(self) -> BlockChanges | None:
        self.events.publish(KVEventBatch(0.0, self.manager.take_events()))
        return self.events.take_changes()


# Few tokens and long runs, so that requests share blocks and differ within them.
Prompt = st.lists(st.integers(0, 1), min_size=1, max_size=4).map(
    lambda runs: [r for r in runs for _ in range(3)]
)
Step = st.one_of(
    st.tuples(st.just("start"), Prompt, st.sampled_from(sorted(KINDS))),
    st.tuples(st.just("decode"), st.integers(0, 1)),
    st.tuples(st.just("end"), st.integers(0, 3)),
    st.tuples(st.just("clear")),
)
# The fate of the report after a step.
Fate = st.sampled_from(["sent", "sent", "later", "lost", "router restarts", "replica restarts"])


@settings(max_examples=150, deadline=None)
@given(steps=st.lists(st.tuples(Step, Fate), max_size=25), probes=st.lists(Prompt, min_size=3, max_size=3))
def test_predicted_hits_are_those_of_the_cache(steps: list[Any], probes: list[list[int]]) -> None:
    cache, replica, router, is_known = Cache(), TrackedBlocks(), PrefixMap(), False
    for (name, *arguments), fate in steps:
        getattr(cache, name)(*arguments)
        if (changes := cache.changes()) is not None:
            replica.apply(changes)
        if fate == "later":
            continue
        if fate == "lost":  # the replica does not know whether the router got it
            replica.take_changes(full=not is_known)
            is_known = False
            continue
        if fate == "router restarts":
            router = PrefixMap()
        elif fate == "replica restarts":
            cache, replica, is_known = Cache(), TrackedBlocks(), False
            router.keep_only([])
        is_known = router.report("w", replica.take_changes(full=not is_known))
        if not is_known:
            continue
        for ids in (*probes, *(list(one.all_token_ids) for one in cache.running)):
            for kind, salt in SALTS.items():
                blocks = prompt_blocks(np.array(ids, np.uint32), SIZE, salt)
                hits = cache.count_hits(ids, kind)
                assert router.cached_tokens(["w"], blocks).tolist() == [hits], (kind, ids)


def test_blocks_of_an_answer_are_cached_with_its_prompt() -> None:
    cache, router = Cache(), PrefixMap()
    cache.start([1, 2, 3], "plain")
    for token in range(10, 20):
        cache.decode(token)
    cache.end(0)
    changes = cache.changes()
    assert changes is not None
    router.report("w", BlockChanges(changes.added, full=True))
    turn = prompt_blocks(np.array([1, 2, 3, *range(10, 20), 5], np.uint32), SIZE)
    assert router.cached_tokens(["w"], turn).tolist() == [12]


@pytest.mark.parametrize("kind", sorted(KINDS.keys() - SALTS.keys()))
def test_blocks_with_other_extra_keys_have_no_id(kind: str) -> None:
    cache = Cache()
    cache.start(list(range(13)), kind)
    changes = cache.changes()
    assert cache.count_hits(list(range(13)), kind) == 12
    assert changes is None


def block_stored(*, parent: bytes | None, token_ids: list[int], group: int) -> BlockStored:
    """Return vLLM's event of a stored block with the hash `h`, after the block with the hash `parent`."""
    return BlockStored(
        block_hashes=[b"h"],
        parent_block_hash=parent,
        token_ids=token_ids,
        block_size=len(token_ids),
        lora_id=None,
        medium="GPU",
        lora_name=None,
        group_idx=group,
    )


def test_equal_blocks_are_cached_until_the_last_is_evicted() -> None:
    cache = PrefixEvents(0, SIZE)
    stored = block_stored(parent=None, token_ids=[1, 2, 3, 4], group=0)

    def publish(*events: Any) -> bool:
        cache.publish(KVEventBatch(0.0, [*events]))
        changes = cache.take_changes()
        return changes is not None and bool(changes.removed)

    removed = module.BlockRemoved([b"h"], "GPU", 0)
    assert not publish(stored, stored, removed)
    assert publish(removed)
    assert not publish(removed)


def test_parts_of_blocks_other_groups_and_unknown_parents_have_no_id() -> None:
    cache = PrefixEvents(1, SIZE)
    part_of_a_block = block_stored(parent=None, token_ids=[1] * (SIZE - 1), group=1)
    block_of_another_group = block_stored(parent=None, token_ids=[1] * SIZE, group=0)
    block_after_an_unknown_one = block_stored(parent=b"unknown", token_ids=[1] * SIZE, group=1)
    for stored in (part_of_a_block, block_of_another_group, block_after_an_unknown_one):
        cache.publish(KVEventBatch(0.0, [stored]))
        assert cache.take_changes() is None


def configurations(**changes: Any) -> tuple[Any, Any]:
    """Return the configurations of a whole replica and of its KV cache, with these changes."""
    values = {"role": "kv_both", "events": None, "ranks": 1, "caching": True, "blocks": 9, "size": SIZE}
    values |= changes
    config = SimpleNamespace(
        cache_config=SimpleNamespace(
            enable_prefix_caching=values["caching"], block_size=values["size"], kv_cache_size_tokens=99
        ),
        kv_transfer_config=SimpleNamespace(kv_role=values["role"]),
        kv_events_config=values["events"],
        parallel_config=SimpleNamespace(data_parallel_size=values["ranks"]),
    )
    spec = FullAttentionSpec(block_size=SIZE, num_kv_heads=1, head_size=1, dtype=torch.float32)
    group = SimpleNamespace(kv_cache_spec=spec, host_resident=False, layer_names=["layer"])
    return config, SimpleNamespace(num_blocks=values["blocks"], kv_cache_groups=[group])


def test_a_whole_replica_collects_events() -> None:
    config, kv_cache_config = configurations()
    assert prefix_events(config, kv_cache_config, log_stats=True) is not None
    assert config.kv_events_config.enable_kv_cache_events
    assert config.kv_events_config.publisher == "null"


@pytest.mark.parametrize(
    "changes",
    [
        {"role": "kv_producer"},
        {"events": object()},
        {"ranks": 2},
        {"caching": False},
        {"blocks": module._MAX_REPORTED_BLOCKS + 1},
        {"size": 2 * SIZE},
        {"log_stats": False},
    ],
)
def test_other_engines_are_left_to_the_estimate(changes: dict[str, Any]) -> None:
    log_stats = changes.pop("log_stats", True)
    config, kv_cache_config = configurations(**changes)
    before = config.kv_events_config
    assert prefix_events(config, kv_cache_config, log_stats=log_stats) is None
    assert config.kv_events_config is before
