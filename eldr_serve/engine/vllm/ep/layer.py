"""One rank's experts of one MoE layer: the content of its slots, and the share of a batch that they serve."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from eldr_serve.experts.placement import Topology
from eldr_serve.experts.replica_choice import ReplicaChoice, make_choice

Ints = NDArray[np.int64]
KEPT = 4096  # batches in the log; new ones replace the oldest
# Columns of the log, per batch: its tokens; of this rank, the slots with at least one token, the (token,
# expert) pairs, those of them whose token has its home here, and its tokens with another home. Homes are
# equal blocks of the batch.
LOGGED = ("tokens", "activated", "pairs", "pairs_at_home", "guests")


class LayerExperts:
    """A rank's slots of a layer, and the replica choice, which is equal on all ranks.

    Args:
        weights: [S, ...] each, expert weights by slot; the first E / G slots hold experts, in order.
        slots: P, number of slots of all ranks.
        num_experts: E.
        topology: topology of the G ranks.
        rank: this rank.
        rule: name of the replica choice (`eldr_serve.experts.replica_choice`).
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
    ) -> None:
        self.weights, self.num_experts, self.topology, self.rank = weights, num_experts, topology, rank
        self.size = slots // topology.ranks  # slots per rank
        self.log = np.zeros((KEPT, len(LOGGED)), np.int32)
        self.routed = torch.zeros(num_experts, dtype=torch.int64)  # tokens per expert since the start
        self.batches = 0
        self.load: ArrayLike | None = None  # float[E], expected tokens per expert, for rules that use it
        self.rule = rule
        row = np.full((topology.ranks, self.size), -1, np.int64)
        row[:, : num_experts // topology.ranks] = np.arange(num_experts).reshape(topology.ranks, -1)
        self.row: Ints
        self._choice: ReplicaChoice
        self.put(row.reshape(-1))

    def put(self, row: Ints) -> None:
        """Serve from the next batch on by the experts int[P] of all slots (-1: empty).

        The caller has already moved the weights.
        """
        self.row = row
        self._choice = make_choice(self.rule, row, self.num_experts, self.topology, load=self.load)

    def local_slots(self, experts: Tensor) -> Tensor:
        """Return int64[T, k], this rank's slot for each (token, expert) pair; -1: another rank's."""
        local = self._choice.slots(experts) - self.rank * self.size
        here = (local >= 0) & (local < self.size)
        local = torch.where(here, local, -1)
        load = torch.bincount(local.reshape(-1) + 1, minlength=self.size + 1)[1:]
        tokens, ranks = len(experts), self.topology.ranks
        home = slice(-(-self.rank * tokens // ranks), -(-(self.rank + 1) * tokens // ranks))
        served = here.any(dim=1)
        self.log[self.batches % KEPT] = (
            tokens, int((load > 0).sum()), int(load.sum()), int(here[home].sum()),
            int(served.sum() - served[home].sum()),
        )  # fmt: skip
        self.routed += torch.bincount(experts.reshape(-1), minlength=self.num_experts)
        self.batches += 1
        return local

    def slot_bytes(self) -> int:
        """Return the size of one expert's weights, bytes."""
        return sum(weight[0].numel() * weight.element_size() for weight in self.weights)
