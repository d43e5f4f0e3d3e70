"""Expert counts per KV block (ELDR, section 4.4): one row per block, indexed by the block's id.

Array sizes: B KV blocks, L MoE layers, E experts per layer, k experts per token, T tokens of a step.
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
    """Return the narrowest type for a cell: it counts each token of a block at most once."""
    kinds = (torch.uint8, torch.int16, torch.int32)
    return next(kind for kind in kinds if block_size <= torch.iinfo(kind).max)


class BlockExpertCounts:
    """[B,L,E] of `cell_dtype`: number of tokens of block b that chose expert e in layer l.

    Rows follow the life cycle of their KV blocks. Writing a block at offset 0 begins a new block, so its
    row is reset; a block that is found in the prefix cache keeps the row of the request that computed it.

    Args:
        num_blocks: number of KV blocks of the engine.
        block_size: tokens per block.
        num_layers: L.
        num_experts: E.
        device: device of the counts; that of the KV cache.
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
        """Return the size of the cache, bytes."""
        return self.rows.nbytes

    def record(self, slots: Tensor, experts: Tensor, begun: Tensor) -> None:
        """Count one step's tokens.

        Args:
            slots: int64[T], the KV slot to which each token's KV was written.
            experts: int[L,T,k], the chosen experts.
            begun: int64[n], the blocks whose first slot is among `slots`.
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
        """Do the same as `record` with host memory: one loop replaces a dozen torch operations.

        Args:
            slots: int64[T].
            experts: for each layer, int[T,k] or larger.
            top_k: k.
            begun: the blocks whose first slot is among `slots`.
        """
        rows, where = self.rows.numpy(), slots.numpy()
        for block in begun:
            rows[block] = 0
        count = _counting_loop()
        for layer, chosen in enumerate(experts):
            count(rows, where, chosen.numpy(), layer, top_k, self._block_size)

    def total_on_host(self, blocks: Sequence[int]) -> NDArray[np.int32]:
        """Do the same as `total` with host memory."""
        found: NDArray[np.int32] = self.rows.numpy()[blocks].sum(0, dtype=np.int32)
        return found

    def total(self, blocks: Tensor) -> Tensor:
        """Return int32[L,E], the counts of all tokens in `blocks` (int64[n])."""
        return self.rows.index_select(0, blocks).sum(dim=0, dtype=torch.int32)


@cache
def _counting_loop() -> Any:
    """Return the loop, compiled on first use by numba, a dependency of vLLM."""
    from numba import njit

    def count(rows: Any, slots: Any, experts: Any, layer: int, top_k: int, size: int) -> None:
        for token in range(len(slots)):
            block = slots[token] // size
            for choice in range(top_k):
                rows[block, layer, experts[token, choice]] += 1

    return njit(boundscheck=True)(count)


def active_experts(experts: Tensor, num_experts: int) -> Tensor:
    """Return int64[L], the number of distinct experts in each layer of int[L,T,k]."""
    chosen = torch.zeros((experts.shape[0], num_experts), dtype=torch.bool, device=experts.device)
    chosen.scatter_(1, experts.flatten(1).long(), True)
    return chosen.sum(dim=1)
