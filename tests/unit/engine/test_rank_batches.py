"""Tokens of data-parallel ranks, between real gloo processes: the same as of one process."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch import distributed as dist

from benchmarks.lib.ep.ranks import run_on_ranks
from eldr_serve.engine.vllm.ep.exchange import RankBatches

HIDDEN, TOP_K = 8, 3
SIZES = [[3, 1], [0, 4], [2, 2], [1, 0], [1, 1]]


def tokens_of(rank: int, step: int, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return hidden states, weights and ids of a rank's tokens, equal in every process."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    hidden = torch.randn(tokens, HIDDEN, generator=generator).bfloat16()
    weights = torch.rand(tokens, TOP_K, generator=generator)
    return hidden, weights, torch.randint(64, (tokens, TOP_K), generator=generator)


def exchange(rank: int, steps: list[list[int]]) -> None:
    batches = RankBatches(dist.group.WORLD)
    for step, sizes in enumerate(steps):
        batches.begin(sizes[rank])
        assert batches.sizes == sizes
        padded = [
            torch.cat([part, part.new_zeros(2, part.shape[1])]) for part in tokens_of(rank, step, sizes[rank])
        ]
        gathered = batches.gather(*padded)
        by_rank = [tokens_of(other, step, tokens) for other, tokens in enumerate(sizes)]
        expected = [torch.cat(parts) for parts in zip(*by_rank, strict=True)]
        for part_of_batch, expected_part in zip(gathered, expected, strict=True):
            assert part_of_batch.dtype == expected_part.dtype
            assert torch.equal(part_of_batch, expected_part)
        total = len(sizes) * (len(sizes) + 1) / 2
        combined = batches.combine(gathered[0].float() * (rank + 1))
        assert torch.allclose(combined, total * tokens_of(rank, step, sizes[rank])[0].float())


@pytest.mark.parametrize("steps", [SIZES, [[0, 3, 1], [2, 0, 0], [4, 4, 4]]])
def test_every_rank_gets_the_tokens_of_all_ranks_and_the_sums_of_its_own(steps: list[list[int]]) -> None:
    run_on_ranks(len(steps[0]), exchange, steps)


def test_idle_ranks_send_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    batches = object.__new__(RankBatches)
    batches._group, batches._rank, batches.ranks, batches.sizes = None, 1, 2, [0, 0]
    monkeypatch.setattr("eldr_serve.engine.vllm.ep.exchange.dist", SimpleNamespace())  # any call fails
    hidden, weights, ids = batches.gather(*tokens_of(1, 0, 1))
    assert (hidden.shape, weights.shape, ids.shape) == ((0, HIDDEN), (0, TOP_K), (0, TOP_K))
    assert batches.combine(hidden).shape == (0, HIDDEN)
