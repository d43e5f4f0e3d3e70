"""Which replica serves each pair of a token and an expert in a batch: what engines run, on tensors.

One layer and one placement of it. All ranks that see the same batch choose alike, without a message.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Literal, get_args

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from eldr_serve.expert_placement import Topology
from eldr_serve.experts.metro import MetroPlan
from eldr_serve.experts.metro_torch import TorchMetro

Ints = NDArray[np.int64]
Rule = Literal["none", "even", "metro", "local", "weighted"]
RULES: tuple[str, ...] = get_args(Rule)
_KNUTH = 2654435769  # the multiplier of vLLM's own spread over replicas


def slots_by_rank(row: ArrayLike, num_experts: int, ranks: int) -> Ints:
    """int64[E, G]: the first physical slot of an expert on a rank; -1 where there is none.

    Args:
        row: int[P], the logical expert of each slot, rank-major; -1: the slot is empty.
        num_experts, ranks: E and G.
    """
    held = np.asarray(row)
    found = np.full((num_experts, ranks), -1, np.int64)
    for slot in np.flatnonzero(held >= 0)[::-1].tolist():  # the first is written last
        found[held[slot], slot * ranks // len(held)] = slot
    return found


class ReplicaChoice(ABC):
    """A rule, for the replicas of one layer."""

    @abstractmethod
    def slots(self, experts: Tensor) -> Tensor:
        """int64[T, k], the physical slot that serves each pair.

        Args:
            experts: int[T, k], the logical experts of each token.
        """


class FirstReplica(ReplicaChoice):
    """None: an expert's first slot serves all its tokens, and its replicas serve nobody.

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
    """EPLB's: an expert's tokens over all its replicas, by a hash of the token's place, as vLLM does.

    Args:
        row: int[P], as for `slots_by_rank`.
        num_experts: E.
    """

    def __init__(self, row: ArrayLike, num_experts: int) -> None:
        held = [np.flatnonzero(np.asarray(row) == expert) for expert in range(num_experts)]
        most = max(map(len, held))
        self._table = torch.from_numpy(np.stack([np.resize(found, most) for found in held]))
        self._count = torch.tensor([len(found) for found in held])

    def slots(self, experts: Tensor) -> Tensor:
        ids = experts.long()
        turn = (torch.arange(len(ids)) * _KNUTH & 0xFFFFFFFF)[:, None]
        return self._table[ids, turn % self._count[ids]]


class OnePerExpert(ReplicaChoice):
    """A rule by which all tokens of a batch go to one replica of their expert.

    Attributes:
        chosen: int[E], physical slots, at an address that does not change; -1 where no token asks.
    """

    chosen: Tensor

    def update(self, experts: Tensor) -> None:
        """Choose for a batch of experts int[T, k]; ids that are none are skipped."""

    def slots(self, experts: Tensor) -> Tensor:
        self.update(experts)
        return self.chosen.long()[experts.long()]


class Metro(OnePerExpert):
    """METRO: so that no rank activates too many experts (`eldr_serve.experts.metro`).

    Args:
        slots: int[E, G], of `slots_by_rank`.
        device: where batches are.
        gather: sum over all ranks of int32[1, E + 1], where each routes its own tokens; None: all see all.
    """

    def __init__(
        self,
        slots: Ints,
        device: torch.device | str = "cpu",
        gather: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        device = torch.device(device)
        self._metro = _metro_on(device)(MetroPlan.of(slots >= 0), device, stored=slots[None])
        self._active = torch.zeros(1, len(slots) + 1, dtype=torch.int32, device=device)  # last: no expert
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
    """GRACE-MoE's locality where a rank routes its own tokens: its replica, one of its node, any by turns.

    Args:
        slots: int[E, G], of `slots_by_rank`.
        topology: of the G ranks.
        rank: that routes.
        device: where batches are.
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
    """GRACE-MoE's weighted polling (Algorithms 3 and 4) where every rank sees all tokens.

    A replica is drawn by weights, one over the load that its rank is expected to bear (Eq. 3). The draw is
    a hash of the token's place: all ranks draw alike.

    Args:
        slots: int[E, G], of `slots_by_rank`.
        topology: of the G ranks.
        load: float[E], expected tokens of each expert; None: all alike.
        local: first the token's own rank, then its node; tokens live on the ranks in equal blocks.
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
        # From the last candidate on nothing is left to chance, nor to rounding.
        above = np.where(np.arange(topology.ranks) >= last, 2.0, below / below[..., -1:])
        self._above, self._slots = torch.from_numpy(above), torch.from_numpy(slots)

    def slots(self, experts: Tensor) -> Tensor:
        ids, tokens = experts.long(), len(experts)
        place = torch.arange(tokens)
        home = place * self._slots.shape[1] // max(tokens, 1)
        draw = (place * _KNUTH & 0xFFFFFFFF).double() / 2**32
        rank = (draw[:, None, None] >= self._above[ids, home[:, None]]).sum(dim=2)
        return self._slots[ids, rank]


def make_choice(
    rule: str, row: ArrayLike, num_experts: int, topology: Topology, *, load: ArrayLike | None = None
) -> ReplicaChoice:
    """The rule on a CPU rank that sees the tokens of all ranks.

    Args:
        rule: one of RULES.
        row: int[P], as for `slots_by_rank`; every expert has a slot.
        num_experts: E.
        topology: of the ranks.
        load: float[E], for local and weighted.

    Raises:
        ValueError: an unknown rule.
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
    """int64[G, G]: 0 on the rank itself, 1 on its node, 2 elsewhere."""
    node = topology.node_of
    return np.where(np.eye(topology.ranks, dtype=bool), 0, np.where(node[:, None] == node, 1, 2))


def _metro_on(device: torch.device) -> type[TorchMetro]:
    """The kernel where there is one for the device."""
    if device.type != "cuda":
        return TorchMetro
    from eldr_serve.experts.metro_triton import TritonMetro  # Triton is there where CUDA is

    return TritonMetro  # type: ignore[return-value]  # of the same form
