"""The change of a rank's experts from one placement to another while it serves, slice by slice."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from eldr_serve.engine.vllm.ep.layer import LOG_SIZE, LayerExperts
from eldr_serve.engine.vllm.ep.transfer import transfer
from eldr_serve.experts.expert_placement import check_placement_fits
from eldr_serve.experts.parallel.moves import Move, check_can_begin, keep_slots, slice_moves
from eldr_serve.experts.parallel.replica_choice import RULES
from eldr_serve.validation import unknown_name

# The methods of LiveExperts that `EldrWorkerExtension.eldr_experts` calls.
RankMethod = Literal["batches", "begin", "choose", "move", "routed", "status", "stop"]


class LiveExperts:
    """A rank's part of a swap; all ranks receive the same calls, between two steps.

    Args:
        layers: all MoE layers of the model.
        moves_per_slice: maximum number of experts that move between two steps.
        group: process group of the ranks.
        called_together: whether all ranks receive a call between the same two steps. Data-parallel ranks do
            not, so they refuse changes. Otherwise one rank would wait for weights that another rank sends
            only after its own step, and this step would wait for the first rank.
    """

    def __init__(
        self,
        layers: Sequence[LayerExperts],
        moves_per_slice: int,
        group: Any,
        *,
        called_together: bool = True,
    ) -> None:
        self._called_together = called_together
        self._layers, self._slice_size, self._group = dict(enumerate(layers)), moves_per_slice, group
        self._slices: deque[list[Move]] = deque()  # slices that are still to be moved
        # Since the start: experts moved by all ranks, bytes received by this rank.
        self._num_moved, self._received_bytes = 0, 0

    def begin(self, placement: ArrayLike, ranks: int, load: ArrayLike | None = None) -> int:
        """Plan a swap; no expert moves yet, but replicas are chosen by the new load at once.

        Args:
            placement: int[L, P]; -1: the slot becomes empty.
            ranks: number of ranks that the placement is for.
            load: float[L, E], expected number of tokens of each expert, for replica choices that use it. It
                is valid for the old placement too, so `stop` keeps it. None: unchanged.

        Returns:
            Number of slices.

        Raises:
            ValueError: the placement does not fit, a swap is under way, or the ranks are not called
                together; nothing was changed.
        """
        self._check_changeable()
        first = self._layers[0]
        check_can_begin(ranks, first.topology.ranks, len(self._slices))
        rows = np.asarray(placement)
        check_placement_fits(
            # For the check, fill empty slots with an expert that the layer has.
            np.where(rows == -1, rows.max(axis=-1, keepdims=True), rows),
            layers=len(self._layers),
            slots=first.slots_per_rank * ranks,
            num_experts=first.num_experts,
            ranks=ranks,
        )
        if load is not None and np.shape(load) != (len(self._layers), first.num_experts):
            raise ValueError(f"the load has shape {np.shape(load)}, not one number per layer and expert")
        old = self.placement()
        self._slices.extend(slice_moves(old, keep_slots(old, rows, ranks), ranks, self._slice_size))
        if load is not None:
            for number, layer in self._layers.items():
                layer.load = np.asarray(load)[number]
                layer.set_placement(layer.row)
        return len(self._slices)

    def choose(self, rule: str) -> None:
        """Choose replicas by this rule from the next step on; raise ValueError if that is impossible."""
        self._check_changeable()
        if rule not in RULES:
            raise ValueError(unknown_name("", rule, RULES, "replica choice"))
        for layer in self._layers.values():
            layer.rule = rule
            layer.set_placement(layer.row)

    def _check_changeable(self) -> None:
        if not self._called_together:
            raise ValueError(
                "data-parallel ranks cannot change their experts while they serve: set additional_config's "
                "eldr_experts and start the engine again"
            )

    def move(self) -> int:
        """Move the next slice; return the number of slices left.

        A rank that fails exits, since other ranks may have moved their part; the engine ends with it.
        """
        if self._slices:
            moves = self._slices[0]
            try:
                self._received_bytes += transfer(self._layers, moves, self._group)
            except Exception as error:
                raise SystemExit(f"experts could not be moved between ranks: {error}") from error
            self._num_moved += sum(move.expert >= 0 for move in moves)
            self._slices.popleft()
        return len(self._slices)

    def stop(self) -> int:
        """End the swap, leaving experts where they are now; return the number of slices not made."""
        num_left = len(self._slices)
        self._slices.clear()
        return num_left

    def placement(self) -> NDArray[np.int64]:
        """Return int64[L, P], the experts in the slots; -1: empty."""
        return np.stack([layer.row for layer in self._layers.values()])

    def status(self) -> dict[str, Any]:
        """Return the state of this rank for status and metrics, as JSON types.

        Returns:
            placement [L, P], replica_choice, slices_left, experts_moved (by all ranks), bytes_received (by
            this rank), and this rank's memory for experts: weight_bytes without replicas, replica_bytes of
            the redundant slots, slice_bytes (the most that a swap buffers, except in cyclic moves).
        """
        first = self._layers[0]
        expert = [layer.slot_bytes() for layer in self._layers.values()]
        redundant = first.slots_per_rank - first.num_experts // first.topology.ranks
        return {
            "placement": self.placement().tolist(),
            "replica_choice": first.rule,
            "slices_left": len(self._slices),
            "experts_moved": self._num_moved,
            "bytes_received": self._received_bytes,
            "weight_bytes": (first.slots_per_rank - redundant) * sum(expert),
            "replica_bytes": redundant * sum(expert),
            "slice_bytes": self._slice_size * max(expert),
        }

    def batches(self, since: int) -> tuple[int, list[list[list[int]]]]:
        """Return the log of this rank's latest batches.

        Args:
            since: the number that the previous call returned; 0: all batches in the log, at most LOG_SIZE.

        Returns:
            Number of batches since the start, and [N][L][LOG_COLUMNS] of the new ones.
        """
        end = min(layer.batches for layer in self._layers.values())
        rows = np.arange(max(since, end - LOG_SIZE), end) % LOG_SIZE
        return end, np.stack([layer.log[rows] for layer in self._layers.values()], axis=1).tolist()

    def routed(self) -> list[list[int]]:
        """Return [L, E], tokens per expert since the start, as EPLB counts them; equal on all ranks."""
        return [layer.routed.tolist() for layer in self._layers.values()]
