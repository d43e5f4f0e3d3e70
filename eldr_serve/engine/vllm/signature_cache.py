"""Expert counts at KV-block granularity (ELDR, section 4.4): one row a block, indexed by its id.

Array sizes: B KV blocks, L MoE layers, E experts a layer, k experts a token, T tokens of a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def cell_dtype(block_size: int) -> torch.dtype:
    """The narrowest type of a cell, which counts at most one a token of its block."""
    kinds = (torch.uint8, torch.int16, torch.int32)
    return next(kind for kind in kinds if block_size <= torch.iinfo(kind).max)


class SignatureCache:
    """[B,L,E] of `cell_dtype`: how many tokens of block b chose expert e in layer l.

    It needs no life cycle of its own. A row means what its block's KV means: a block that is written
    at offset 0 is a new block, so its row starts again from zero; a block that is found in the prefix
    cache keeps the row of whoever computed it.

    Args:
        num_blocks: KV blocks of the engine.
        block_size: tokens a block.
        device: where the counts lie; that of the KV cache.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        num_layers: int,
        num_experts: int,
        device: torch.device | str = "cpu",
    ) -> None:
        self._block_size = block_size
        self.rows = torch.zeros(
            (num_blocks, num_layers, num_experts), dtype=cell_dtype(block_size), device=device
        )
        self._layer_cells = torch.arange(num_layers, device=device)[:, None] * num_experts

    @property
    def nbytes(self) -> int:
        """Memory, bytes."""
        return self.rows.nbytes

    def record(self, slots: Tensor, experts: Tensor, begun: Tensor) -> None:
        """Count one step's tokens.

        Args:
            slots: int64[T], the KV slot that each token's KV was written to.
            experts: int[L,T,k], the experts chosen.
            begun: int64[n], the blocks that some of the slots are the first of.
        """
        self.rows[begun] = 0
        blocks = torch.div(slots, self._block_size, rounding_mode="floor")
        _, num_layers, num_experts = self.rows.shape
        first = torch.add(self._layer_cells, blocks, alpha=num_layers * num_experts)  # [L,T], expert 0's cell
        cells = experts.to(torch.int64, copy=True).add_(first[..., None]).flatten()
        self.rows.view(-1).scatter_add_(0, cells, torch.ones_like(cells, dtype=self.rows.dtype))

    def record_on_host(
        self, slots: Tensor, experts: Sequence[Tensor], top_k: int, begun: Sequence[int]
    ) -> None:
        """The same, where all lies in the host's memory: one loop in place of a dozen of torch's operations.

        Args:
            slots: int64[T].
            experts: for each layer, int[T,k] or larger.
            top_k: k.
            begun: the blocks that some of the slots are the first of.
        """
        rows, where = self.rows.numpy(), slots.numpy()
        for block in begun:
            rows[block] = 0
        count = _counting_loop()
        for layer, chosen in enumerate(experts):
            count(rows, where, chosen.numpy(), layer, top_k, self._block_size)

    def total_on_host(self, blocks: Sequence[int]) -> NDArray[np.int32]:
        """As `total`, likewise."""
        found: NDArray[np.int32] = self.rows.numpy()[blocks].sum(0, dtype=np.int32)
        return found

    def total(self, blocks: Tensor) -> Tensor:
        """int32[L,E], the counts of the tokens that lie in `blocks` (int64[n])."""
        return self.rows.index_select(0, blocks).sum(dim=0, dtype=torch.int32)


@cache
def _counting_loop() -> Any:
    """Compiled on first use, by a package that vLLM brings along."""
    from numba import njit

    def count(rows: Any, slots: Any, experts: Any, layer: int, top_k: int, size: int) -> None:
        for token in range(len(slots)):
            block = slots[token] // size
            for place in range(top_k):
                rows[block, layer, experts[token, place]] += 1

    return njit(boundscheck=True)(count)


def active_experts(experts: Tensor, num_experts: int) -> Tensor:
    """int64[L], distinct experts that a step's tokens chose, from int[L,T,k]."""
    chosen = torch.zeros((experts.shape[0], num_experts), dtype=torch.bool, device=experts.device)
    chosen.scatter_(1, experts.flatten(1).long(), True)
    return chosen.sum(dim=1)
