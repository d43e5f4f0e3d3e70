"""Expert counts per KV block (ELDR, section 4.4) in vLLM's workers: one row per block, indexed by its id.

Array sizes: B KV blocks, L MoE layers, E experts per layer, k experts per token, T tokens of a step.
"""

from __future__ import annotations

import torch
from torch import Tensor


def cell_dtype(block_size: int) -> torch.dtype:
    """Return the narrowest type for a cell: it counts each token of a block at most once."""
    kinds = (torch.uint8, torch.int16, torch.int32)
    return next(kind for kind in kinds if block_size <= torch.iinfo(kind).max)


class BlockExpertCounts:
    """[B,L,E] of `cell_dtype`: number of tokens of block b that chose expert e in layer l.

    A row lives as long as its KV block. When the block's first token is written, the block is new, so its row
    is reset. A block that a request finds in the prefix cache keeps the row of the request that computed it.

    Args:
        num_blocks: number of KV blocks of the engine.
        block_size: tokens per block.
        num_layers: L.
        num_experts: E.
        device: device of the counts and of the KV cache.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        num_layers: int,
        num_experts: int,
        device: torch.device | str = "cpu",
    ) -> None:
        self.block_size = block_size
        self.rows = torch.zeros(
            (num_blocks, num_layers, num_experts), dtype=cell_dtype(block_size), device=device
        )
        self._layer_cells = torch.arange(num_layers, device=device)[:, None] * num_experts

    @property
    def nbytes(self) -> int:
        """Return the size of the cache, bytes."""
        return self.rows.nbytes

    def record(self, slots: Tensor, experts: Tensor, new_blocks: Tensor) -> None:
        """Count one step's tokens.

        Args:
            slots: int64[T], the KV slot to which each token's KV was written.
            experts: int[L,T,k], the chosen experts.
            new_blocks: int64[n], the blocks whose first slot is among `slots`.
        """
        self.rows[new_blocks] = 0
        blocks = torch.div(slots, self.block_size, rounding_mode="floor")
        _, num_layers, num_experts = self.rows.shape
        first = torch.add(self._layer_cells, blocks, alpha=num_layers * num_experts)  # [L,T], expert 0's cell
        cells = experts.to(torch.int64, copy=True).add_(first[..., None]).flatten()
        self.rows.view(-1).scatter_add_(0, cells, torch.ones_like(cells, dtype=self.rows.dtype))

    def total(self, blocks: Tensor) -> Tensor:
        """Return int32[L,E], the counts of all tokens in `blocks` (int64[n])."""
        return self.rows.index_select(0, blocks).sum(dim=0, dtype=torch.int32)


def active_experts(experts: Tensor, num_experts: int) -> Tensor:
    """Return int64[L], the number of distinct experts in each layer of int[L,T,k]."""
    chosen = torch.zeros((experts.shape[0], num_experts), dtype=torch.bool, device=experts.device)
    chosen.scatter_(1, experts.flatten(1).long(), True)
    return chosen.sum(dim=1)
