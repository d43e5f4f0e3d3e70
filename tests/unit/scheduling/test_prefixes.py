"""Cached prefixes of workers, compared with a naive search of all prompts that were sent."""

from itertools import takewhile

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eldr_serve.router.status import router_status
from eldr_serve.scheduling import Decision, Loads, PlacementRequest, Policy, prefixes
from eldr_serve.scheduling.cost import StepSums
from eldr_serve.scheduling.placer import Placer
from eldr_serve.scheduling.prefixes import (
    BlockChanges,
    PrefixCache,
    PrefixCacheSize,
    PrefixMap,
    PromptBlocks,
    TrackedBlocks,
    prompt_blocks,
)
from eldr_serve.scheduling.types import Lease, LeaseState
from tests.support.fake_router import loads, place, release, router_state
from tests.support.tables import fail, request

SIZE = 4  # tokens of a block


def blocks(*ids: int, salt: str = "") -> PromptBlocks:
    return prompt_blocks(np.array(ids, np.uint32), SIZE, salt)


# Few tokens, and long runs of equal ones, so that prompts share prefixes and differ within them.
Prompt = st.lists(st.integers(0, 1), max_size=6).map(lambda runs: [run for run in runs for _ in range(3)])
Sent = st.lists(st.tuples(st.sampled_from("ab"), st.sampled_from(["", "salt"]), Prompt), max_size=12)


def common(a: list[int], b: list[int]) -> int:
    return len(list(takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False))))


@settings(max_examples=200)
@given(sent=Sent, prompt=Prompt, salt=st.sampled_from(["", "salt"]))
def test_cached_tokens_are_those_of_the_longest_sent_prefix(
    sent: list[tuple[str, str, list[int]]], prompt: list[int], salt: str
) -> None:
    prefix_map = PrefixMap()
    for worker, other_salt, ids in sent:
        prefix_map.record_prompt(worker, blocks(*ids, salt=other_salt))
    expected = []
    for name in "ab":
        # A block is cached if its prompt was computed to the end of it; the last token is not cached.
        tokens = [
            min(common(prompt, ids), len(prompt) - 1, len(ids) - 1) // SIZE * SIZE
            for worker, other_salt, ids in sent
            if (worker, other_salt) == (name, salt)
        ]
        expected.append(max([0, *tokens]))
    cached_tokens = prefix_map.cached_tokens(["a", None, "b"], blocks(*prompt, salt=salt))
    assert cached_tokens.tolist() == [expected[0], 0, expected[1]]


class Naive:
    """A cache of the most recently used blocks, as a list that is searched linearly."""

    def __init__(self, room: int) -> None:
        self.room, self.used = room, list[int]()  # newest first

    def record_prompt(self, hashes: list[int]) -> None:
        first = hashes[: self.room]
        self.used = (first + [block for block in self.used if block not in first])[: self.room]

    def count_hits(self, hashes: list[int]) -> int:
        return len(list(takewhile(self.used.__contains__, hashes)))


@settings(max_examples=200)
@given(prompts=st.lists(Prompt, min_size=1, max_size=20), room=st.integers(1, 6), later=st.integers(1, 6))
def test_a_cache_is_bounded_and_keeps_the_newest_prefixes(
    prompts: list[list[int]], room: int, later: int
) -> None:
    cache, naive = PrefixCache(room), Naive(room)
    chains = [blocks(*ids).hashes.tolist() for ids in prompts]
    for number, chain in enumerate(chains):
        if number == len(chains) // 2:
            cache.resize(later)
            naive.room, naive.used = later, naive.used[:later]
        cache.record_prompt(chain)
        naive.record_prompt(chain)
        assert len(cache) <= cache.capacity
        assert cache.count_hits(chain) == min(len(chain), cache.capacity)
        for other in chains:
            assert cache.count_hits(other) == naive.count_hits(other)
            # The known blocks of a prompt are its first ones, so that the search can be a bisection.
            assert sum(cache.count_hits([block]) for block in other) == cache.count_hits(other)


def test_a_hash_covers_the_salt_and_all_tokens_up_to_the_end_of_its_block() -> None:
    hashes = blocks(*range(13)).hashes
    assert (hashes.dtype, len(hashes), len(set(hashes.tolist()))) == (np.uint64, 3, 3)
    assert blocks(*range(12)).hashes.tolist() == hashes[:2].tolist()  # the last token is always computed
    assert blocks(*range(9), 99, *range(10, 13)).hashes.tolist()[:2] == hashes[:2].tolist()
    assert not set(blocks(99, *range(1, 13)).hashes.tolist()) & set(hashes.tolist())
    assert not set(blocks(*range(13), salt="x").hashes.tolist()) & set(hashes.tolist())
    assert not len(blocks(1, 2, 3, 4).hashes)
    assert not len(blocks().hashes)


def test_the_map_holds_the_prefixes_of_live_workers_only() -> None:
    prefix_map = PrefixMap()
    prefix_map.set_capacity("a", kv_tokens=2 * SIZE, block_tokens=SIZE)
    prompt = blocks(*range(21))
    for worker in "ab":
        prefix_map.record_prompt(worker, prompt)
    assert len(prefix_map) == 2 + 5
    assert prefix_map.cached_tokens("ab", prompt).tolist() == [2 * SIZE, 5 * SIZE]
    prefix_map.set_capacity("b", kv_tokens=3 * SIZE, block_tokens=SIZE)
    assert prefix_map.cached_tokens("ab", prompt).tolist() == [2 * SIZE, 3 * SIZE]
    prefix_map.keep_only("b")
    assert prefix_map.cached_tokens("ab", prompt).tolist() == [0, 3 * SIZE]
    prefix_map.record_prompt("a", prompt)
    assert prefix_map.cached_tokens("a", prompt).tolist() == [5 * SIZE]  # its capacity is forgotten too


def ids(prompt: PromptBlocks, *places: int) -> bytes:
    """Return the ids of these blocks of a prompt."""
    return prompt.hashes[list(places)].tobytes()


def test_a_prompt_counts_as_cached_until_its_engine_has_not_reported_it_for_long() -> None:
    prefix_map, prompt, other = PrefixMap(), blocks(*range(13)), blocks(*range(50, 63))

    def cached(of: PromptBlocks = prompt) -> int:
        return int(prefix_map.cached_tokens("a", of)[0])

    assert not prefix_map.report("a", BlockChanges(ids(prompt, 0)))  # a report was missed
    assert not prefix_map.report("a", None)
    assert cached() == 0
    assert prefix_map.reported_blocks("a") is None
    assert prefix_map.report("a", BlockChanges(ids(prompt, 0), full=True))
    assert prefix_map.report("a", None)
    assert cached() == SIZE
    prefix_map.record_prompt("a", prompt)
    assert cached() == 3 * SIZE
    prefix_map.report("a", BlockChanges(ids(prompt, 1)))
    prefix_map.report("a", BlockChanges(removed=ids(prompt, 2)))  # it was computed and evicted
    assert cached() == 2 * SIZE
    assert prefix_map.reported_blocks("a") == 2
    prefix_map.record_prompt("a", other)  # this request is cancelled
    for _ in range(prefixes._UNCONFIRMED_REPORTS):
        assert cached(other) == 3 * SIZE
        prefix_map.report("a", None)  # an idle engine has no changes
    assert [cached(other), cached()] == [0, 2 * SIZE]
    prefix_map.report("a", BlockChanges(ids(other, 0), full=True))
    assert [cached(other), cached()] == [SIZE, 0]
    prefix_map.keep_only("b")
    assert cached(other) == 0


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("reported", [False, True])
def test_blocks_that_an_engine_evicted_before_it_got_their_prompt_are_computed_again(
    reported: bool, full: bool
) -> None:
    prefix_map, prompt = PrefixMap(), blocks(*range(13))
    prefix_map.report("a", BlockChanges(ids(prompt, 0, 1, 2) if reported else b"", full=True))
    prefix_map.record_prompt("a", prompt)
    prefix_map.report("a", BlockChanges(ids(prompt, 0) if full else b"", ids(prompt, 1, 2), full))
    assert prefix_map.cached_tokens("a", prompt).tolist() == [3 * SIZE]
    prefix_map.report("a", BlockChanges(removed=ids(prompt, 2)))
    assert prefix_map.cached_tokens("a", prompt).tolist() == [2 * SIZE]


def test_changes_cannot_replace_a_set_of_blocks() -> None:
    tracked = TrackedBlocks()
    with pytest.raises(ValueError, match="full report"):
        tracked.apply(BlockChanges(b"12345678", full=True))
    assert tracked.take_changes() is None


def test_prompts_to_be_computed_are_bounded() -> None:
    prefix_map, prompt = PrefixMap(), blocks(*range(21))
    prefix_map.set_capacity("a", kv_tokens=2 * SIZE, block_tokens=SIZE)
    prefix_map.report("a", BlockChanges(full=True))
    prefix_map.record_prompt("a", blocks(*range(90, 99)))
    prefix_map.record_prompt("a", prompt)
    assert prefix_map.cached_tokens("a", prompt).tolist() == [2 * SIZE]
    assert (len(prefix_map), prefix_map.reported_blocks("a")) == (2, 0)
    prefix_map.set_capacity("a", kv_tokens=SIZE, block_tokens=SIZE)
    assert prefix_map.cached_tokens("a", prompt).tolist() == [SIZE]
    prefix_map.set_capacity("a", kv_tokens=9 * SIZE, block_tokens=SIZE)
    prefix_map.record_prompt("a", prompt)
    assert prefix_map.cached_tokens("a", prompt).tolist() == [5 * SIZE]


def test_prompts_whose_ids_are_not_the_engines_are_compared_with_each_other_only() -> None:
    prefix_map, chat = PrefixMap(), prompt_blocks(np.arange(13, dtype=np.uint32), SIZE, exact=False)
    exact = blocks(*range(13))
    assert chat.hashes.tolist() == exact.hashes.tolist()
    prefix_map.report("a", BlockChanges(ids(exact, 0), full=True))
    assert prefix_map.cached_tokens("a", chat).tolist() == [0]
    prefix_map.record_prompt("a", chat)
    assert prefix_map.cached_tokens("a", chat).tolist() == [3 * SIZE]
    assert prefix_map.cached_tokens("a", exact).tolist() == [SIZE]


def test_the_router_asks_for_all_blocks_of_a_worker_that_it_does_not_know() -> None:
    state, prompt = router_state(workers=1, table=None, policy="round-robin"), blocks(*range(17))

    def report(changes: BlockChanges | None, replica: str = "r0") -> bool:
        return state.observe_steps(StepSums(), replica, PrefixCacheSize(SIZE, 99 * SIZE), changes)

    assert not report(None)
    assert not report(BlockChanges(ids(prompt, 0)))
    assert report(BlockChanges(ids(prompt, 0, 1), full=True))
    assert not report(BlockChanges(full=True), "gone")
    assert report(BlockChanges(removed=ids(prompt, 1)))
    assert place(state, request("a", 17, blocks=prompt))[0].cached_tokens == SIZE
    (worker,) = router_status(state)["workers"]
    assert worker["cached_blocks"] == 1
    state.ingresses.set_reachable_workers("c", ["r0 restarted"])
    assert not report(None, "r0 restarted")


class Longest(Policy):
    def select(self, request: PlacementRequest, loads: Loads, rng: np.random.Generator) -> Decision:
        assert loads.cached_tokens is not None
        return Decision(int(loads.cached_tokens.argmax()), num_candidates=len(loads), reason="longest")


def test_policies_see_the_cached_tokens_of_each_worker_and_leases_those_of_their_own() -> None:
    placer = Placer(Longest(), on_policy_error=fail)
    placer.set_workers(["w0", "w1"])
    system, other = list(range(8)), list(range(100, 109))
    held = Lease(request("first", blocks=blocks(*system, 1)), LeaseState.GRANTED, worker="w1")
    placer.adopt_lease(held)  # an ingress's own choice counts too
    lost = Lease(request("lost", blocks=blocks(*other)), LeaseState.GRANTED, worker="gone")
    placer.adopt_lease(lost)
    assert len(placer.workers.prefixes) == 2

    def place(name: str, *ids: int) -> Lease:
        (lease,) = placer.submit([Lease(request(name, blocks=blocks(*ids)), LeaseState.SENT)])
        return lease

    assert [(p.worker, p.cached_tokens) for p in (place("a", *system, 2), place("b", *other))] == [
        ("w1", 8),
        ("w0", 0),
    ]
    assert place("c", *other).cached_tokens == 8
    place("c", *system, 3)
    placer.set_workers(["w0", "new"])  # w1 was restarted under another name
    assert place("d", *system, 2).cached_tokens == 0
    assert place("e", *other).cached_tokens == 8


@pytest.mark.parametrize(("generated", "pending"), [(0, 9), (1, 0)])
def test_the_prompt_of_an_adopted_lease_is_to_be_prefilled_until_its_first_token(
    generated: int, pending: int
) -> None:
    placer = Placer(Longest(), on_policy_error=fail)
    placer.set_workers(["w0", "w1"])
    of_ingress = request("a", 9, blocks=blocks(*range(9)))
    placer.adopt_lease(Lease(of_ingress, LeaseState.GRANTED, worker="w1", generated_tokens=generated))
    assert placer.workers.loads().prefill_tokens.tolist() == [0, pending]


def test_the_router_counts_cached_tokens_within_each_replicas_capacity() -> None:
    state = router_state(workers=1, table=None, policy="round-robin")
    prompt = blocks(*range(17))

    def cached(name: str) -> int:
        (lease,) = place(state, request(name, 17, blocks=prompt))
        release(state, name)
        return lease.cached_tokens

    assert [cached("a"), cached("b")] == [0, 16]
    counted = {name: state.counters[name] for name in ("prefill_tokens", "prefill_tokens_cached")}
    assert counted == {"prefill_tokens": 34, "prefill_tokens_cached": 16}
    state.observe_steps(StepSums(), "r0", PrefixCacheSize(SIZE, 2 * SIZE))
    assert cached("c") == 8
    state.ingresses.set_reachable_workers("c", ["r1"])
    assert cached("d") == 0
    assert set(loads(state)) == {"r1"}
    # A late report of a removed replica sets no capacity.
    state.observe_steps(StepSums(), "r0", PrefixCacheSize(SIZE, 2 * SIZE))
    state.ingresses.set_reachable_workers("c", ["r0"])
    assert [cached("e"), cached("f")] == [0, 16]


def test_pending_prefill_is_in_a_workers_load_until_the_first_token_or_counts() -> None:
    state = router_state(workers=1, table=None, policy="round-robin")
    prompt = blocks(*range(17))

    def lacks() -> int:
        return int(state.placer.workers.loads().prefill_tokens[0])

    place(state, *(request(name, 17, blocks=prompt) for name in "abcd"), request("split", 17))
    assert lacks() == 17 + 3 * 1
    state.leases.set_generated_tokens({"a": 1})
    assert lacks() == 3
    state.leases.set_measured_counts(request("b", 18))
    assert lacks() == 2
    release(state, "c")
    assert lacks() == 1
    place(state, request("d", 17, blocks=prompt))  # it is placed again
    assert lacks() == 1
    release(state, "a", "b", "d", "split")
    assert lacks() == 0


def test_the_whole_prompt_is_computed_where_prefixes_are_not_shared() -> None:
    none = prompt_blocks(np.arange(99, dtype=np.uint32), 0)
    assert not len(none.hashes)
    state = router_state(workers=1, table=None, policy="round-robin")
    for name in "ab":
        (lease,) = place(state, request(name, 99, blocks=none))
        assert lease.cached_tokens == 0
    assert state.placer.workers.loads().prefill_tokens.tolist() == [198]


@pytest.mark.parametrize("fields", [{}, {"blocks": blocks()}])
def test_prompts_without_blocks_are_not_remembered(fields: dict[str, PromptBlocks]) -> None:
    state = router_state(workers=2, table=None, policy="marginal-cost")
    (lease,) = place(state, request("a", **fields))
    assert lease.cached_tokens == 0
    assert not len(state.placer.workers.prefixes)
