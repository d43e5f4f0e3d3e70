"""Change the expert placement of a running engine through its client."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from eldr_serve.experts.placement import ExpertPlacement

Call = Callable[..., Awaitable[list[Any]]]  # the signature of AsyncLLM.collective_rpc


class PlacementError(ValueError):
    """The engine refused the placement, for the reason in the message; its placement is unchanged."""


@dataclass(frozen=True)
class Swapped:
    """The outcome of a swap.

    Attributes:
        slices: number of slices, between which the engine ran steps.
        experts: number of experts that changed slots, over all layers.
        received_bytes: size of the weights received from other ranks, over all ranks.
        seconds: total duration, including the steps between slices.
    """

    slices: int
    experts: int
    received_bytes: int
    seconds: float


async def swap_placement(call: Call, placement: ExpertPlacement, load: ArrayLike | None = None) -> Swapped:
    """Move a running engine's experts to a placement, one slice between two steps.

    Answers do not change: after each slice every expert has a slot. Cancellation leaves the experts where
    the slices so far have moved them.

    Args:
        call: `collective_rpc` of the engine's client.
        placement: the new placement.
        load: float[L, E], expected number of tokens of each expert, for replica choices that use it; None:
            unchanged.

    Raises:
        PlacementError: the placement does not fit the engine, or another swap is under way.
    """
    began = time.monotonic()
    before = await _call_ranks(call, "status")
    expected = None if load is None else np.asarray(load, float).tolist()
    rows = placement.physical_to_logical.tolist()
    planned = asyncio.ensure_future(_call_ranks(call, "begin", rows, placement.ranks, expected))
    left = 1
    try:
        slices = left = (await asyncio.shield(planned))[0]
        while left:
            left = (await _call_ranks(call, "move"))[0]
    finally:
        with suppress(PlacementError):  # refused: there is no swap to end
            await planned  # cancelling the caller does not stop the engine's planning
            if left:
                await _call_ranks(call, "stop")
    after = await _call_ranks(call, "status")
    return Swapped(
        slices,
        after[0]["experts_moved"] - before[0]["experts_moved"],
        sum(new["bytes_received"] - old["bytes_received"] for old, new in zip(before, after, strict=True)),
        time.monotonic() - began,
    )


async def _call_ranks(call: Call, method: str, *arguments: Any) -> list[Any]:
    """Return the answer of each rank's LiveExperts; raise PlacementError if one refuses."""
    answers = await call("eldr_experts", args=(method, *arguments))
    for answer in answers:
        if isinstance(answer, str):
            raise PlacementError(answer)
    return answers
