"""The placement of experts by vLLM's expert-parallel load balancer (EPLB), at the start and in service."""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from eldr_serve.arrays import Ints
from eldr_serve.engine.vllm.compat.checked import UnsupportedEngineError
from eldr_serve.engine.vllm.compat.eplb import (
    AbstractEplbPolicy,
    EplbModelState,
    EplbState,
    get_ep_group,
)
from eldr_serve.engine.vllm.experts_config import ExpertsConfig
from eldr_serve.experts.expert_placement import check_placement_fits
from eldr_serve.experts.parallel.moves import check_can_begin, keep_slots


def place_experts(state: EplbState, placement: Ints) -> None:
    """Move the weights of all ranks to a placement [L, P] for good; all ranks call this together.

    Raises:
        UnsupportedEngineError: the placement does not fit the model, or vLLM did not move the experts.
    """
    model = model_of(state)
    layers, slots = model.physical_to_logical_map.shape
    experts = model.logical_replica_count.shape[1]
    try:
        check_placement_fits(
            placement, layers=layers, slots=slots, num_experts=experts, ranks=get_ep_group().world_size
        )
    except ValueError as error:
        raise UnsupportedEngineError(str(error)) from error
    state.policy = fixed_policy(placement)
    state.rearrange()
    if not np.array_equal(placement_of(state), placement):
        raise UnsupportedEngineError("vLLM did not move the experts to the placement")


def model_of(state: EplbState) -> EplbModelState:
    """Return the only model under EPLB; raise UnsupportedEngineError if there are more."""
    models = list(state.model_states.values())
    if len(models) != 1:
        raise UnsupportedEngineError(f"expert placement needs one model under EPLB, not {len(models)}")
    return models[0]


def placement_of(state: EplbState) -> Ints:
    """Return the experts in the slots of all ranks, int64[L, P]."""
    placement: Ints = model_of(state).physical_to_logical_map.cpu().numpy().copy()
    return placement


def fixed_policy(placement: Ints) -> type[AbstractEplbPolicy]:
    """Return an EPLB policy that always returns this placement; later rearrangements move nothing."""
    slots = torch.from_numpy(placement)

    class FixedPlacement(AbstractEplbPolicy):
        @classmethod
        def rebalance_experts(cls, *_: Any, **__: Any) -> Tensor:
            return slots.clone()

    return FixedPlacement


class EplbExperts:
    """A rank's part of a swap, with the methods that LiveExperts has on engines on CPUs.

    vLLM moves the weights and updates its maps in place, so captured CUDA graphs stay valid.

    Args:
        state: EPLB of this rank.
        config: the setting of the engine.
        called_together: see LiveExperts.
    """

    def __init__(self, state: EplbState, config: ExpertsConfig, *, called_together: bool) -> None:
        self._state, self._config, self._called_together = state, config, called_together
        self._ranks, self._rank = get_ep_group().world_size, get_ep_group().rank_in_group
        self._new = self.placement()  # the placement that the swap leads to
        self._slices: deque[Ints] = deque()  # numbers of layers, whose experts are still to be moved
        # Since the start: experts moved by all ranks, bytes received by this rank.
        self._num_moved, self._received_bytes = 0, 0

    def begin(self, placement: ArrayLike, ranks: int, load: ArrayLike | None = None) -> int:
        """Plan a swap and return its number of slices; no expert moves yet.

        Args:
            placement: int[L, P].
            ranks: number of ranks that the placement is for.
            load: ignored, since vLLM's own replica choice does not depend on it.

        Raises:
            ValueError: the placement does not fit, a swap is under way, or this engine cannot move experts
                while it serves; nothing was changed.
        """
        self._check_changeable()
        check_can_begin(ranks, self._ranks, len(self._slices))
        model, old, rows = model_of(self._state), self.placement(), np.asarray(placement)
        layers, slots = old.shape
        experts = model.logical_replica_count.shape[1]
        check_placement_fits(rows, layers=layers, slots=slots, num_experts=experts, ranks=ranks)
        self._new = keep_slots(old, rows, ranks)
        changed, size = np.flatnonzero((self._new != old).any(axis=1)), self._config.layers_per_slice
        self._slices.extend(changed[start : start + size] for start in range(0, len(changed), size))
        return len(self._slices)

    def move(self) -> int:
        """Move the next slice; return the number of slices left.

        A rank that fails exits, since other ranks may have moved their part; the engine ends with it.
        """
        if self._slices:
            layers, old = self._slices[0], self.placement()
            rows = old.copy()
            rows[layers] = self._new[layers]
            try:
                place_experts(self._state, rows)
            except Exception as error:
                raise SystemExit(f"experts could not be moved between ranks: {error}") from error
            self._num_moved += int((rows != old).sum())
            self._received_bytes += self._count_received_bytes(old, rows)
            self._slices.popleft()
        return len(self._slices)

    def stop(self) -> int:
        """End the swap, leaving experts where they are now; return the number of slices not made."""
        num_left = len(self._slices)
        self._slices.clear()
        return num_left

    def choose(self, rule: str) -> None:
        """Raise ValueError: vLLM's workers set the replica choice before they capture CUDA graphs."""
        raise ValueError(f"engines on GPUs choose replicas as configured: set replica_choice to {rule}")

    def placement(self) -> Ints:
        """Return the experts in the slots of all ranks, int64[L, P]."""
        return placement_of(self._state)

    def status(self) -> dict[str, Any]:
        """Return the state of this rank for status and metrics; see LiveExperts."""
        rows, slot_bytes = self.placement(), self._slot_bytes()
        slots = rows.shape[1] // self._ranks
        own = model_of(self._state).logical_replica_count.shape[1] // self._ranks
        return {
            "placement": rows.tolist(),
            "replica_choice": self._config.replica_choice,
            "slices_left": len(self._slices),
            "experts_moved": self._num_moved,
            "bytes_received": self._received_bytes,
            "weight_bytes": own * sum(slot_bytes),
            "replica_bytes": (slots - own) * sum(slot_bytes),
            "slice_bytes": slots * max(slot_bytes),  # vLLM buffers one layer at a time
        }

    def _check_changeable(self) -> None:
        if not self._called_together:
            raise ValueError("data-parallel ranks cannot change their experts while they serve")
        if self._config.replica_choice != "even":
            raise ValueError(
                f"engines on GPUs with replica_choice {self._config.replica_choice} cannot change their "
                "experts while they serve, since CUDA graphs keep this choice: set replica_choice to even"
            )

    def _slot_bytes(self) -> list[int]:
        """Return the size of an expert's weights in each layer."""
        weights = model_of(self._state).model.expert_weights
        return [sum(part[0].nbytes for part in layer) for layer in weights]

    def _count_received_bytes(self, old: Ints, new: Ints) -> int:
        """Return the size of the weights that came from other ranks, each expert once."""
        before, after = (
            rows.reshape(len(rows), self._ranks, -1)[:, self._rank].tolist() for rows in (old, new)
        )
        received = [len(set(now) - set(past)) for past, now in zip(before, after, strict=True)]
        return sum(count * size for count, size in zip(received, self._slot_bytes(), strict=True))
