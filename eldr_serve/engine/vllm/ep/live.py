"""The experts of all layers of a rank while it serves: from one placement to the next in slices."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from eldr_serve.engine.vllm.ep.layer import KEPT, LayerExperts
from eldr_serve.engine.vllm.ep.transfer import transfer
from eldr_serve.expert_placement import check_fits
from eldr_serve.experts.moves import Move, aligned, sliced
from eldr_serve.experts.replica_choice import RULES


class LiveExperts:
    """A rank's part of a swap; every rank is asked the same, between two steps.

    Args:
        layers: all MoE layers of the model.
        moves_a_slice: at most so many experts move between two steps.
        group: process group of the ranks.
    """

    def __init__(self, layers: Sequence[LayerExperts], moves_a_slice: int, group: Any) -> None:
        self._layers, self._most, self._group = dict(enumerate(layers)), moves_a_slice, group
        self._waiting: deque[list[Move]] = deque()
        self._moved, self._received = 0, 0  # since the start: experts of all ranks, bytes of this one

    def begin(self, placement: ArrayLike, ranks: int, load: ArrayLike | None = None) -> int:
        """Plan a swap to placement int[L, P]; nothing moves yet.

        Args:
            placement: -1: the slot shall be empty.
            ranks: that the placement is for.
            load: float[L, E], tokens that each expert is expected to get, for choices that ask; None: those
                of the swap before.

        Returns:
            Slices to come.

        Raises:
            ValueError: the placement does not fit, or a swap is under way; all stays as it is.
        """
        if self._waiting:
            raise ValueError(f"a swap of expert placements is under way: {len(self._waiting)} slices to come")
        first = self._layers[0]
        if ranks != first.topology.ranks:
            raise ValueError(f"the placement is for {ranks} ranks, the engine has {first.topology.ranks}")
        rows = np.asarray(placement)
        check_fits(
            # What is in place of nothing may be any expert that the layer has.
            np.where(rows == -1, rows.max(axis=-1, keepdims=True), rows),
            layers=len(self._layers), slots=first.size * ranks, num_experts=first.num_experts, ranks=ranks,
        )  # fmt: skip
        if load is not None and np.shape(load) != (len(self._layers), first.num_experts):
            raise ValueError(f"the load is of shape {np.shape(load)}, not one number a layer and expert")
        old = self.placement()
        self._waiting.extend(sliced(old, aligned(old, rows, ranks), ranks, self._most))
        if load is not None:
            for number, layer in self._layers.items():
                layer.load = np.asarray(load)[number]
                layer.put(layer.row)
        return len(self._waiting)

    def choose(self, rule: str) -> None:
        """From the next step on choose replicas by this rule; ValueError if there is no such."""
        if rule not in RULES:
            raise ValueError(f"unknown replica choice {rule!r}; there are {', '.join(RULES)}")
        for layer in self._layers.values():
            layer.rule = rule
            layer.put(layer.row)

    def move(self) -> int:
        """The next slice; returns how many are left.

        A rank that cannot do its part ends, since others may have done theirs: the engine ends with it.
        """
        if self._waiting:
            moves = self._waiting[0]
            try:
                self._received += transfer(self._layers, moves, self._group)
            except Exception as error:
                raise SystemExit(f"experts could not be moved between ranks: {error}") from error
            self._moved += sum(move.expert >= 0 for move in moves)
            self._waiting.popleft()
        return len(self._waiting)

    def stop(self) -> int:
        """Leave the experts where the slices so far have put them; returns how many are not made."""
        left = len(self._waiting)
        self._waiting.clear()
        return left

    def placement(self) -> NDArray[np.int64]:
        """int64[L, P], what the slots hold; -1: nothing."""
        return np.stack([layer.row for layer in self._layers.values()])

    def status(self) -> dict[str, Any]:
        """What this rank holds and did, for messages and metrics; JSON-able.

        Returns:
            placement [L, P], replica_choice, slices_left, experts_moved (of all ranks), bytes_received (by
            this rank), and this rank's memory for experts: weight_bytes without replicas, replica_bytes of
            the redundant slots, slice_bytes that wait beside them in a swap, at most but for rings.
        """
        first = self._layers[0]
        expert = [layer.slot_bytes() for layer in self._layers.values()]
        redundant = first.size - first.num_experts // first.topology.ranks
        return {
            "placement": self.placement().tolist(),
            "replica_choice": first.rule,
            "slices_left": len(self._waiting),
            "experts_moved": self._moved,
            "bytes_received": self._received,
            "weight_bytes": (first.size - redundant) * sum(expert),
            "replica_bytes": redundant * sum(expert),
            "slice_bytes": self._most * max(expert),
        }

    def batches(self, since: int) -> tuple[int, list[list[list[int]]]]:
        """What this rank did for the latest batches.

        Args:
            since: of the last answer; 0: all that are known, at most 4,096.

        Returns:
            How many there were since the start, and [N][L][LOGGED] of the new ones.
        """
        end = min(layer.batches for layer in self._layers.values())
        wanted = np.arange(max(since, end - KEPT), end) % KEPT
        return end, np.stack([layer.log[wanted] for layer in self._layers.values()], axis=1).tolist()

    def routed(self) -> list[list[int]]:
        """[L, E] tokens of each expert since the start, as EPLB counts them; equal on all ranks."""
        return [layer.routed.tolist() for layer in self._layers.values()]
