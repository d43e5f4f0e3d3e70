"""A new placement on a running engine, by the calls that an engine's client has."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from eldr_serve.expert_placement import ExpertPlacement

Call = Callable[..., Awaitable[list[Any]]]  # as AsyncLLM.collective_rpc


class PlacementError(ValueError):
    """The engine does not take the placement, one sentence says why; its own stays."""


@dataclass(frozen=True)
class Swapped:
    """What a swap took.

    Attributes:
        slices: between which the engine made steps.
        experts: that changed slots, all layers.
        received_bytes: of the weights that came from other ranks, all ranks.
        seconds: in all, steps in between included.
    """

    slices: int
    experts: int
    received_bytes: int
    seconds: float


async def swap_placement(call: Call, placement: ExpertPlacement, load: ArrayLike | None = None) -> Swapped:
    """Bring a running engine's experts to a placement, a slice between two of its steps.

    Answers do not change: after each slice every expert has a slot. If this is cancelled, the experts stay
    where the slices so far have put them.

    Args:
        call: `collective_rpc` of the engine's client.
        load: float[L, E], tokens that each expert is expected to get, for replica choices that ask; None:
            those of the swap before.

    Raises:
        PlacementError: the placement does not fit the engine, or another swap is under way.
    """
    began = time.monotonic()
    before = await _asked(call, "status")
    expected = None if load is None else np.asarray(load, float).tolist()
    rows = placement.physical_to_logical.tolist()
    planned = asyncio.ensure_future(_asked(call, "begin", rows, placement.ranks, expected))
    left = 1
    try:
        slices = left = (await asyncio.shield(planned))[0]
        while left:
            left = (await _asked(call, "move"))[0]
    finally:
        with suppress(PlacementError):  # then there is no swap of ours to end
            await planned  # the engine goes on planning for a caller who is cancelled
            if left:
                await _asked(call, "stop")
    after = await _asked(call, "status")
    return Swapped(
        slices,
        after[0]["experts_moved"] - before[0]["experts_moved"],
        sum(new["bytes_received"] - old["bytes_received"] for old, new in zip(before, after, strict=True)),
        time.monotonic() - began,
    )


async def _asked(call: Call, method: str, *arguments: Any) -> list[Any]:
    """What each rank's LiveExperts answers; PlacementError if one says no."""
    answers = await call("eldr_experts", args=(method, *arguments))
    for answer in answers:
        if isinstance(answer, str):
            raise PlacementError(answer)
    return answers
