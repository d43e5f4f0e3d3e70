"""The exchange of tokens between the data-parallel ranks of an expert-parallel CPU engine."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch import distributed as dist


class RankBatches:
    """The tokens of all ranks in the current forward, from one rank's point of view.

    All ranks make the same calls in the same order, since they run their forwards together.

    Args:
        group: process group of the ranks.

    Attributes:
        sizes: number of tokens of each rank in the current forward; 0 for a rank without requests.
        forwards: number of forwards begun, which is the same on all ranks.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)
        self.sizes = [0] * self.ranks
        self.forwards = 0

    def begin(self, tokens: int) -> None:
        """Begin a forward in which this rank has `tokens` tokens; exchange the numbers of all ranks."""
        gathered = torch.empty(self.ranks, dtype=torch.int64)
        dist.all_gather_into_tensor(gathered, torch.tensor([tokens]), group=self._group)
        self.sizes = gathered.tolist()
        self.forwards += 1

    def gather(self, *parts: Tensor) -> list[Tensor]:
        """Return the rows of all ranks, in the order of ranks.

        All parts are sent to each rank in one message. Nothing is sent if no rank has tokens.

        Args:
            parts: [T, n_i] each, with a row for each token of this rank; further rows are ignored.
        """
        own, longest = self.sizes[self._rank], max(self.sizes)
        packed = torch.cat([part[:own].contiguous().view(torch.uint8) for part in parts], dim=1)
        padded = packed.new_zeros(longest, packed.shape[1])
        padded[:own] = packed
        gathered = packed.new_empty(self.ranks * longest, packed.shape[1])
        if longest:
            dist.all_gather_into_tensor(gathered, padded, group=self._group)
        rows = torch.cat(
            [gathered[rank * longest : rank * longest + size] for rank, size in enumerate(self.sizes)]
        )
        return _unpack(rows, parts)

    def combine(self, partial: Tensor) -> Tensor:
        """Return this rank's rows of the sum over ranks.

        Args:
            partial: [T, H], one rank's part of the result for the tokens of all ranks; it is overwritten.
        """
        if len(partial):
            dist.all_reduce(partial, group=self._group)
        return self.select_own(partial)

    def select_own(self, rows: Tensor) -> Tensor:
        """Return this rank's rows among the rows of all ranks."""
        start = sum(self.sizes[: self._rank])
        return rows[start : start + self.sizes[self._rank]]


def _unpack(rows: Tensor, parts: Sequence[Tensor]) -> list[Tensor]:
    """Return the columns of bytes as tensors of the parts' types."""
    widths = [part.shape[1] * part.element_size() for part in parts]
    # A view as another type needs aligned rows, and `contiguous` does not align a single row.
    columns = [column.clone(memory_format=torch.contiguous_format) for column in rows.split(widths, dim=1)]
    return [column.view(part.dtype) for column, part in zip(columns, parts, strict=True)]
