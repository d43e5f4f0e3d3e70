"""Rules that choose the replica for each pair of a token and an expert in a batch; engines run them.

A rule covers one layer of one placement. All ranks that see the same batch make the same choice without
communication.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Literal, get_args

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from eldr_serve.experts.metro import MetroPlan
from eldr_serve.experts.metro_torch import TorchMetro
from eldr_serve.experts.placement import Topology

Ints = NDArray[np.int64]
Rule = Literal["none", "even", "metro", "local", "weighted"]
RULES: tuple[str, ...] = get_args(Rule)
_KNUTH = 2654435769  # multiplier of vLLM's hash over replicas


def slots_by_rank(row: ArrayLike, num_experts: int, ranks: int) -> Ints:
    """Return the first physical slot of each expert on each rank, int64[E, G]; -1 where there is none.

    Args:
        row: int[P], logical expert of each slot, rank-major; -1: the slot is empty.
        num_experts, ranks: E and G.
    """
    held = np.asarray(row)
    found = np.full((num_experts, ranks), -1, np.int64)
    for slot in np.flatnonzero(held >= 0)[::-1].tolist():  # write the first slot last
        found[held[slot], slot * ranks // len(held)] = slot
    return found


class ReplicaChoice(ABC):
    """A rule for choosing replicas in one layer."""

    @abstractmethod
    def slots(self, experts: Tensor) -> Tensor:
        """Return the physical slot that serves each pair, int64[T, k].

        Args:
            experts: int[T, k], logical experts of each token.
        """


class FirstReplica(ReplicaChoice):
    """Rule `none`: the first slot of an expert serves all its tokens; other replicas are unused.

    Args:
        row: int[P], as for `slots_by_rank`.
        num_experts: E.
    """

    def __init__(self, row: ArrayLike, num_experts: int) -> None:
        held = np.asarray(row)
        self._slot = torch.tensor([int(np.argmax(held == expert)) for expert in range(num_experts)])

    def slots(self, experts: Tensor) -> Tensor:
        return self._slot[experts.long()]


class EvenSpread(ReplicaChoice):
    """EPLB's rule in vLLM: a hash of the token's position spreads an expert's tokens over all its replicas.

    Args:
        row: int[P], as for `slots_by_rank`.
        num_experts: E.
    """

    def __init__(self, row: ArrayLike, num_experts: int) -> None:
        held = [np.flatnonzero(np.asarray(row) == expert) for expert in range(num_experts)]
        max_copies = max(map(len, held))
        self._table = torch.from_numpy(np.stack([np.resize(found, max_copies) for found in held]))
        self._count = torch.tensor([len(found) for found in held])

    def slots(self, experts: Tensor) -> Tensor:
        ids = experts.long()
        turn = (torch.arange(len(ids)) * _KNUTH & 0xFFFFFFFF)[:, None]
        return self._table[ids, turn % self._count[ids]]


class OnePerExpert(ReplicaChoice):
    """A rule with one replica per expert for all tokens of a batch.

    Attributes:
        chosen: int[E], physical slots, at a fixed address; -1 for experts without tokens.
    """

    chosen: Tensor

    def update(self, experts: Tensor) -> None:
        """Choose replicas for a batch of experts int[T, k]; invalid ids are ignored."""

    def slots(self, experts: Tensor) -> Tensor:
        self.update(experts)
        return self.chosen.long()[experts.long()]


class Metro(OnePerExpert):
    """METRO, which balances active experts over ranks (`eldr_serve.experts.metro`).

    Args:
        slots: int[E, G], result of `slots_by_rank`.
        device: device of the batches.
        gather: sum over all ranks of int32[1, E + 1], if each rank routes its own tokens; None: every rank
            sees all tokens.
    """

    def __init__(
        self,
        slots: Ints,
        device: torch.device | str = "cpu",
        gather: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        device = torch.device(device)
        self._metro = _metro_on(device)(MetroPlan.of(slots >= 0), device, stored=slots[None])
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


class Nearest(OnePerExpert):
    """GRACE-MoE's locality for ranks that route their own tokens.

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
        away = np.where(slots < 0, 3, _distance(topology)[rank])
        nearest = away == away.min(axis=1, keepdims=True)
        turn = (rank + np.arange(len(slots))) % nearest.sum(axis=1)
        choice = (np.cumsum(nearest, axis=1) == turn[:, None] + 1).argmax(axis=1)
        self.chosen = torch.from_numpy(slots[np.arange(len(slots)), choice]).to(device)


class Polled(ReplicaChoice):
    """GRACE-MoE's weighted polling (Algorithms 3 and 4) for ranks that see all tokens.

    A replica is drawn with a weight of 1 / expected load of its rank (Eq. 3). The draw is a hash of the
    token's position, so all ranks draw the same.

    Args:
        slots: int[E, G], result of `slots_by_rank`.
        topology: topology of the G ranks.
        load: float[E], expected tokens of each expert; None: all equal.
        local: prefer the token's own rank, then its node; tokens belong to the ranks in equal blocks.
    """

    def __init__(
        self, slots: Ints, topology: Topology, *, load: ArrayLike | None = None, local: bool
    ) -> None:
        held = slots >= 0
        share = np.ones(len(slots)) if load is None else np.asarray(load, np.float64)
        share = share / held.sum(axis=1)
        weights = 1 / np.maximum((share[:, None] * held).sum(axis=0), 1.0)
        away = np.where(held[:, None], local * _distance(topology), 3)  # [E, home, G]
        nearest = away == away.min(axis=2, keepdims=True)
        below = np.cumsum(nearest * weights, axis=2)
        last = topology.ranks - 1 - nearest[..., ::-1].argmax(axis=2, keepdims=True)
        # The last candidate always wins, whatever the rounding.
        above = np.where(np.arange(topology.ranks) >= last, 2.0, below / below[..., -1:])
        self._above, self._slots = torch.from_numpy(above), torch.from_numpy(slots)

    def slots(self, experts: Tensor) -> Tensor:
        ids, tokens = experts.long(), len(experts)
        position = torch.arange(tokens)
        home = position * self._slots.shape[1] // max(tokens, 1)
        draw = (position * _KNUTH & 0xFFFFFFFF).double() / 2**32
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
        ValueError: the rule is unknown.
    """
    if rule not in RULES:
        raise ValueError(f"unknown replica choice {rule!r}; there are {', '.join(RULES)}")
    if rule == "none":
        return FirstReplica(row, num_experts)
    if rule == "even":
        return EvenSpread(row, num_experts)
    slots = slots_by_rank(row, num_experts, topology.ranks)
    if rule == "metro":
        return Metro(slots)
    return Polled(slots, topology, load=load, local=rule == "local")


def _distance(topology: Topology) -> Ints:
    """Return the distance between ranks, int64[G, G]: 0 on the same rank, 1 on the same node, else 2."""
    node = topology.node_of
    return np.where(np.eye(topology.ranks, dtype=bool), 0, np.where(node[:, None] == node, 1, 2))


def _metro_on(device: torch.device) -> type[TorchMetro]:
    """Return the implementation for the device."""
    if device.type != "cuda":
        return TorchMetro
    from eldr_serve.experts.metro_triton import TritonMetro  # installed only with CUDA

    return TritonMetro  # type: ignore[return-value]  # same interface
