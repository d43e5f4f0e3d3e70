"""The expert-count cache against a plain dictionary."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eldr_serve.engine.routes import pack_routes, unpack_routes
from eldr_serve.engine.vllm.capture.block_counts import BlockExpertCounts, active_experts

BLOCKS, SIZE, LAYERS, EXPERTS, K = 6, 4, 2, 5, 2
Writes = st.lists(  # steps of (block, first offset, tokens): runs of consecutive slots
    st.lists(
        st.tuples(st.integers(0, BLOCKS - 1), st.integers(0, SIZE - 1), st.integers(1, SIZE)), max_size=4
    ),
    max_size=12,
)


@given(Writes, st.integers(0, 2**16), st.sampled_from([torch.int16, torch.int32, torch.int64]))
@settings(deadline=None)
def test_rows_equal_a_recount_of_all_writes_since_offset_0(
    steps: list[list[tuple[int, int, int]]], seed: int, dtype: torch.dtype
) -> None:
    rng = np.random.default_rng(seed)
    cache = BlockExpertCounts(BLOCKS, SIZE, LAYERS, EXPERTS)
    expected: dict[int, Counter[tuple[int, int]]] = {b: Counter() for b in range(BLOCKS)}
    for step in steps:
        slots: list[int] = []
        written: set[int] = set()
        for block, first, tokens in step:
            if block in written:  # two requests never write one block in the same step
                continue
            written.add(block)
            slots += [block * SIZE + o for o in range(first, min(SIZE, first + tokens))]
        begun = [slot // SIZE for slot in slots if slot % SIZE == 0]
        chosen = np.stack(
            [[rng.permutation(EXPERTS)[:K] for _ in slots] or np.zeros((0, K)) for _ in range(LAYERS)]
        ).astype(np.int64)
        for token, slot in enumerate(slots):
            if slot % SIZE == 0:
                expected[slot // SIZE].clear()
            for layer in range(LAYERS):
                expected[slot // SIZE].update((layer, int(e)) for e in chosen[layer, token])
        cache.record(
            torch.tensor(slots, dtype=torch.int64),
            torch.from_numpy(chosen).to(dtype),
            torch.tensor(begun, dtype=torch.int64),
        )
    for block, counts in expected.items():
        total = cache.total(torch.tensor([block]))
        assert {
            (i, e): int(total[i, e]) for i in range(LAYERS) for e in range(EXPERTS) if total[i, e]
        } == counts
    everything = cache.total(torch.arange(BLOCKS))
    assert int(everything.sum()) == sum(sum(c.values()) for c in expected.values())


@pytest.mark.parametrize(("size", "width"), [(255, 1), (256, 2), (32767, 2), (32768, 4)])
def test_a_block_whose_tokens_all_choose_one_expert_does_not_overflow(size: int, width: int) -> None:
    cache = BlockExpertCounts(1, size, 1, 2)
    cache.record(torch.arange(size), torch.zeros((1, size, 1), dtype=torch.int64), torch.tensor([0]))
    assert cache.total(torch.tensor([0])).tolist() == [[size, 0]]
    assert cache.nbytes == 2 * width


@given(st.integers(0, 9), st.integers(0, 99))
def test_active_experts_are_the_distinct_ones(tokens: int, seed: int) -> None:
    chosen = torch.from_numpy(np.random.default_rng(seed).integers(0, EXPERTS, (LAYERS, tokens, K)))
    assert active_experts(chosen, EXPERTS).tolist() == [
        len(set(layer.flatten().tolist())) for layer in chosen
    ]


def test_routes_round_trip_and_unknown_ones_are_refused() -> None:
    routes = np.random.default_rng(0).integers(0, 300, (7, 3, 2)).astype(np.int16)
    np.testing.assert_array_equal(unpack_routes(pack_routes(routes)), routes)
    for bad in ("", "AAAA", pack_routes(routes)[:-8], "\u00e9"):
        with pytest.raises(ValueError):
            unpack_routes(bad)
