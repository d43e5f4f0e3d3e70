"""One rank's experts of one MoE layer: the content of its slots, and its share of each batch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from eldr_serve.arrays import Ints
from eldr_serve.experts.expert_placement import Topology
from eldr_serve.experts.parallel.replica_choice import ReplicaChoice, make_choice

LOG_SIZE = 4096  # batches in the log; new ones replace the oldest
# Columns of the log, one row per batch; all but the first count this rank's part. A pair is (token, expert).
# A token's home is its data-parallel rank. Without data parallelism, homes are equal blocks of the batch.
LOG_COLUMNS = ("tokens", "slots_with_tokens", "pairs", "pairs_at_home", "tokens_from_other_ranks")


class LayerExperts:
    """A rank's slots of a layer, and the replica choice, which is equal on all ranks.

    Args:
        weights: [S, ...] each, expert weights by slot; the first E / G slots hold experts, in order.
        slots: P, number of slots of all ranks.
        num_experts: E.
        topology: topology of the G ranks.
        rank: this rank.
        rule: name of the replica choice (`eldr_serve.experts.parallel.replica_choice`).
        prefill_rule: name of the replica choice for batches of more than `max_decode_tokens` tokens; None: as
            for other batches.
        max_decode_tokens: the largest batch of all ranks in which no two tokens are of the same request.
    """

    def __init__(
        self,
        weights: Sequence[Tensor],
        *,
        slots: int,
        num_experts: int,
        topology: Topology,
        rank: int,
        rule: str,
        prefill_rule: str | None = None,
        max_decode_tokens: int = 0,
    ) -> None:
        self.weights, self.num_experts, self.topology, self.rank = weights, num_experts, topology, rank
        self.slots_per_rank = slots // topology.ranks
        self.log = np.zeros((LOG_SIZE, len(LOG_COLUMNS)), np.int32)
        self.routed = torch.zeros(num_experts, dtype=torch.int64)  # tokens per expert since the start
        self.batches = 0
        self.load: ArrayLike | None = None  # float[E], expected tokens per expert, for rules that use it
        self.rule, self._prefill_rule, self._max_decode_tokens = rule, prefill_rule, max_decode_tokens
        row = np.full((topology.ranks, self.slots_per_rank), -1, np.int64)
        row[:, : num_experts // topology.ranks] = np.arange(num_experts).reshape(topology.ranks, -1)
        self.row: Ints  # [P], experts in the slots of all ranks; -1: empty
        self._choice: ReplicaChoice
        self._prefill_choice: ReplicaChoice | None = None
        self.set_placement(row.reshape(-1))

    def set_placement(self, row: Ints) -> None:
        """Serve with these experts int[P] in the slots of all ranks (-1: empty) from the next batch on.

        The caller has already moved the weights.
        """
        self.row = row
        self._choice = self._make_choice(self.rule)
        if self._prefill_rule is not None:
            self._prefill_choice = self._make_choice(self._prefill_rule)

    def _make_choice(self, rule: str) -> ReplicaChoice:
        return make_choice(rule, self.row, self.num_experts, self.topology, load=self.load)

    def route_and_log(self, experts: Tensor, sizes: Sequence[int] | None = None) -> Tensor:
        """Log a batch, and return int64[T, k], this rank's slot for each pair; -1: another rank serves it.

        Args:
            experts: int[T, k], logical experts of each token.
            sizes: number of tokens of each rank, in the batch's order; None: equal blocks.
        """
        tokens, ranks = len(experts), self.topology.ranks
        if sizes is None:
            home = None
            start, end = (-(-rank * tokens // ranks) for rank in (self.rank, self.rank + 1))
        else:
            home = torch.arange(ranks).repeat_interleave(torch.tensor(sizes))
            start, end = sum(sizes[: self.rank]), sum(sizes[: self.rank + 1])
        choice = self._choice
        if self._prefill_choice is not None and tokens > self._max_decode_tokens:
            choice = self._prefill_choice
        slots, first = choice.slots(experts, home), self.rank * self.slots_per_rank
        load = torch.bincount(slots.reshape(-1), minlength=len(self.row))[first : first + self.slots_per_rank]
        local = slots - first
        is_local = (local >= 0) & (local < self.slots_per_rank)
        has_local_pair = is_local.any(dim=1)
        self.log[self.batches % LOG_SIZE] = (
            tokens,
            int((load > 0).sum()),
            int(load.sum()),
            int(is_local[start:end].sum()),
            int(has_local_pair.sum() - has_local_pair[start:end].sum()),
        )
        self.routed += torch.bincount(experts.reshape(-1), minlength=self.num_experts)
        self.batches += 1
        return torch.where(is_local, local, -1)

    def slot_bytes(self) -> int:
        """Return the size of one expert's weights, bytes."""
        return sum(weight[0].numel() * weight.element_size() for weight in self.weights)
