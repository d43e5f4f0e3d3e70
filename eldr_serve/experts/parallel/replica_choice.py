"""Rules that choose the replica for each pair of a token and an expert in a batch; engines run them.

A rule covers one layer of one placement. Since a choice depends only on the batch, all ranks that see the
same batch make the same choice without communication.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Literal, get_args

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from eldr_serve.arrays import Ints
from eldr_serve.errors import UserInputError
from eldr_serve.experts.expert_placement import Topology
from eldr_serve.experts.parallel.metro import MetroPlan
from eldr_serve.experts.parallel.metro_torch import TorchMetro
from eldr_serve.validation import unknown_name

Rule = Literal["none", "even", "metro", "metro-paper", "local", "weighted"]
RULES: tuple[str, ...] = get_args(Rule)
_HASH_MULTIPLIER = 2654435769  # multiplier of vLLM's hash over replicas


def slots_by_rank(row: ArrayLike, num_experts: int, ranks: int) -> Ints:
    """Return the first physical slot of each expert on each rank, int64[E, G]; -1 where there is none.

    Args:
        row: int[P], logical expert of each slot, rank-major; -1: the slot is empty.
        num_experts, ranks: E and G.
    """
    experts = np.asarray(row)
    slots = np.full((num_experts, ranks), -1, np.int64)
    for slot in np.flatnonzero(experts >= 0)[::-1].tolist():  # write the first slot last
        slots[experts[slot], slot * ranks // len(experts)] = slot
    return slots


class ReplicaChoice(ABC):
    """A rule for choosing replicas in one layer."""

    @abstractmethod
    def slots(self, experts: Tensor, home: Tensor | None = None) -> Tensor:
        """Return the physical slot that serves each pair, int64[T, k].

        Args:
            experts: int[T, k], logical experts of each token.
            home: int64[T], the rank that each token belongs to; None: equal blocks of the batch.
        """


class FirstReplica(ReplicaChoice):
    """Rule `none`: the first slot of an expert serves all its tokens; other replicas are unused.

    Args:
        row: int[P], as for `slots_by_rank`.
        num_experts: E.
    """

    def __init__(self, row: ArrayLike, num_experts: int) -> None:
        experts = np.asarray(row)
        self._slot = torch.tensor([int(np.argmax(experts == expert)) for expert in range(num_experts)])

    def slots(self, experts: Tensor, home: Tensor | None = None) -> Tensor:
        return self._slot[experts.long()]


class EvenSpread(ReplicaChoice):
    """Rule `even`, as in vLLM's EPLB: a hash of the position spreads an expert's tokens over its replicas.

    Args:
        row: int[P], as for `slots_by_rank`.
        num_experts: E.
    """

    def __init__(self, row: ArrayLike, num_experts: int) -> None:
        replicas = [np.flatnonzero(np.asarray(row) == expert) for expert in range(num_experts)]
        max_copies = max(map(len, replicas))
        self._table = torch.from_numpy(np.stack([np.resize(slots, max_copies) for slots in replicas]))
        self._count = torch.tensor([len(slots) for slots in replicas])

    def slots(self, experts: Tensor, home: Tensor | None = None) -> Tensor:
        ids = experts.long()
        turn = (torch.arange(len(ids)) * _HASH_MULTIPLIER & 0xFFFFFFFF)[:, None]
        return self._table[ids, turn % self._count[ids]]


class OneReplicaPerExpert(ReplicaChoice):
    """A rule with one replica per expert for all tokens of a batch.

    Attributes:
        chosen: int[E], physical slots, at a fixed address; -1 for experts without tokens.
    """

    chosen: Tensor

    def update(self, experts: Tensor) -> None:
        """Choose replicas for a batch of experts int[T, k]; invalid ids are ignored.

        Do nothing by default: a rule such as NearestReplica chooses once, whatever the batch.
        """

    def slots(self, experts: Tensor, home: Tensor | None = None) -> Tensor:
        self.update(experts)
        return self.chosen.long()[experts.long()]


class Metro(OneReplicaPerExpert):
    """Rules `metro` and `metro-paper`, which balance active experts over ranks (`MetroPlan`).

    Args:
        slots: int[E, G], result of `slots_by_rank`.
        device: device of the batches.
        gather: sum over all ranks of int32[1, E + 1], if each rank routes its own tokens; None: every rank
            sees all tokens.
        as_written: choose with the paper's Algorithm 1.
    """

    def __init__(
        self,
        slots: Ints,
        device: torch.device | str = "cpu",
        gather: Callable[[Tensor], Tensor] | None = None,
        *,
        as_written: bool = False,
    ) -> None:
        device = torch.device(device)
        plan = MetroPlan.as_written(slots >= 0) if as_written else MetroPlan.from_hosts(slots >= 0)
        self._metro = _metro_class(device)(plan, device, output_values=slots[None])
        self._active = torch.zeros(1, len(slots) + 1, dtype=torch.int32, device=device)  # last: invalid ids
        self._gather = gather
        self.chosen = self._metro.chosen[0]

    def update(self, experts: Tensor) -> None:
        none = self._active.shape[1] - 1
        ids = experts.reshape(-1).long()
        ids = torch.where((ids >= 0) & (ids < none), ids, none)
        self._active.zero_().index_fill_(1, ids, 1)
        everywhere = self._active if self._gather is None else self._gather(self._active)
        self._metro.route(everywhere[:, :none].contiguous())


class NearestReplica(OneReplicaPerExpert):
    """Rule `local` for ranks that route their own tokens: GRACE-MoE's locality.

    A replica on the rank itself is preferred, then one on its node; ranks and experts alternate between
    equally near replicas.

    Args:
        slots: int[E, G], result of `slots_by_rank`.
        topology: topology of the G ranks.
        rank: the routing rank.
        device: device of the batches.
    """

    def __init__(
        self, slots: Ints, topology: Topology, rank: int, device: torch.device | str = "cpu"
    ) -> None:
        distance = np.where(slots < 0, 3, _distance(topology)[rank])
        nearest = distance == distance.min(axis=1, keepdims=True)
        turn = (rank + np.arange(len(slots))) % nearest.sum(axis=1)
        choice = (np.cumsum(nearest, axis=1) == turn[:, None] + 1).argmax(axis=1)
        self.chosen = torch.from_numpy(slots[np.arange(len(slots)), choice]).to(device)


class PolledReplica(ReplicaChoice):
    """Rules `local` and `weighted` for ranks that see all tokens: GRACE-MoE's polling (Algorithms 3 and 4).

    A replica is drawn with a weight of 1 / expected load of its rank (Eq. 3). The draw is a hash of the
    token's position, so all ranks draw the same.

    Args:
        slots: int[E, G], result of `slots_by_rank`.
        topology: topology of the G ranks.
        load: float[E], expected tokens of each expert; None: all equal.
        local: prefer the token's own rank, then its node.
    """

    def __init__(
        self, slots: Ints, topology: Topology, *, load: ArrayLike | None = None, local: bool
    ) -> None:
        hosted = slots >= 0
        share = np.ones(len(slots)) if load is None else np.asarray(load, np.float64)
        share = share / hosted.sum(axis=1)  # [E], expected tokens of one replica
        weights = 1 / np.maximum((share[:, None] * hosted).sum(axis=0), 1.0)  # [G], 1 / expected load
        distance = np.where(hosted[:, None], local * _distance(topology), 3)  # [E, home, G], 3: no replica
        nearest = distance == distance.min(axis=2, keepdims=True)  # candidates for the tokens of each home
        below = np.cumsum(nearest * weights, axis=2)  # cumulative weights of the candidates
        last = topology.ranks - 1 - nearest[..., ::-1].argmax(axis=2, keepdims=True)
        # The last candidate always wins, whatever the rounding.
        above = np.where(np.arange(topology.ranks) >= last, 2.0, below / below[..., -1:])
        self._above, self._slots = torch.from_numpy(above), torch.from_numpy(slots)

    def table(self, columns: int) -> Tensor:
        """Return the choices for a uniform draw of a column, int64[E, columns], for tokens of rank 0.

        A slot has a share of its expert's columns that is within 1 / columns of its weight.
        """
        draw = (torch.arange(columns).double() + 0.5) / columns
        rank = (draw[None, :, None] >= self._above[:, 0, None]).sum(dim=2)
        return self._slots.gather(1, rank)

    def slots(self, experts: Tensor, home: Tensor | None = None) -> Tensor:
        ids, tokens = experts.long(), len(experts)
        position = torch.arange(tokens)
        if home is None:
            home = position * self._slots.shape[1] // max(tokens, 1)
        draw = (position * _HASH_MULTIPLIER & 0xFFFFFFFF).double() / 2**32
        rank = (draw[:, None, None] >= self._above[ids, home[:, None]]).sum(dim=2)
        return self._slots[ids, rank]


def make_choice(
    rule: str, row: ArrayLike, num_experts: int, topology: Topology, *, load: ArrayLike | None = None
) -> ReplicaChoice:
    """Create a rule for a CPU rank that sees the tokens of all ranks.

    Args:
        rule: one of RULES.
        row: int[P], as for `slots_by_rank`; every expert has a slot.
        num_experts: E.
        topology: topology of the ranks.
        load: float[E], expected tokens, for local and weighted.

    Raises:
        UserInputError: the rule is unknown.
    """
    if rule not in RULES:
        raise UserInputError(unknown_name("", rule, RULES, "replica choice"))
    if rule == "none":
        return FirstReplica(row, num_experts)
    if rule == "even":
        return EvenSpread(row, num_experts)
    slots = slots_by_rank(row, num_experts, topology.ranks)
    if rule in ("local", "weighted"):
        return PolledReplica(slots, topology, load=load, local=rule == "local")
    return Metro(slots, as_written=rule == "metro-paper")


def _distance(topology: Topology) -> Ints:
    """Return the distance between ranks, int64[G, G]: 0 on the same rank, 1 on the same node, else 2."""
    node = topology.node_of
    return np.where(np.eye(topology.ranks, dtype=bool), 0, np.where(node[:, None] == node, 1, 2))


def _metro_class(device: torch.device) -> type[TorchMetro]:
    """Return the implementation for the device."""
    if device.type != "cuda":
        return TorchMetro
    from eldr_serve.experts.parallel.metro_triton import TritonMetro  # Triton is installed only with CUDA

    return TritonMetro  # type: ignore[return-value]  # same interface
