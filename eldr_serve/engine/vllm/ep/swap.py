"""Queries and changes of the expert placement of a running engine, in the process of its client."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike

from eldr_serve.engine.vllm.config import CONFIG_KEY
from eldr_serve.engine.vllm.ep.plugin import is_switched_on
from eldr_serve.errors import RequestRefusedError
from eldr_serve.experts.expert_placement import ExpertPlacement, placement_id

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from eldr_serve.engine.vllm.ep.live import RankMethod  # this imports torch

Call = Callable[..., Awaitable[list[Any]]]  # the signature of AsyncLLM.collective_rpc
_SUMMED = ("weight_bytes", "replica_bytes", "slice_bytes", "bytes_received")  # sums over all ranks


def has_live_experts(vllm_config: VllmConfig) -> bool:
    """Return whether an engine's workers report their experts, as ours on CPUs and PlacedWorker do."""
    if not vllm_config.parallel_config.enable_expert_parallel:
        return False
    return is_switched_on() or CONFIG_KEY in (vllm_config.additional_config or {})


class ExpertPlacementError(ValueError):
    """The engine refused the placement, for the reason in the message; its placement is unchanged."""


@dataclass(frozen=True)
class SwapResult:
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


async def swap_placement(call: Call, placement: ExpertPlacement, load: ArrayLike | None = None) -> SwapResult:
    """Move a running engine's experts to a placement, one slice between two steps.

    Answers do not change, since every expert has a slot after each slice. A cancelled swap leaves the experts
    where it has moved them so far.

    Args:
        call: `collective_rpc` of the engine's client.
        placement: the new placement.
        load: float[L, E], expected number of tokens of each expert, for replica choices that use it; None:
            unchanged.

    Raises:
        ExpertPlacementError: the placement does not fit the engine, or another swap is under way.
    """
    started_at_s = time.monotonic()
    before = await _call_ranks(call, "status")
    expected_tokens = None if load is None else np.asarray(load, float).tolist()
    rows = placement.physical_to_logical.tolist()
    planning = asyncio.ensure_future(_call_ranks(call, "begin", rows, placement.ranks, expected_tokens))
    slices_left = 1
    try:
        slices = slices_left = (await asyncio.shield(planning))[0]
        while slices_left:
            slices_left = (await _call_ranks(call, "move"))[0]
    finally:
        with suppress(ExpertPlacementError):  # there is no swap to end
            await planning  # cancelling the caller does not stop the engine's planning
            if slices_left:
                await _call_ranks(call, "stop")
    after = await _call_ranks(call, "status")
    return SwapResult(
        slices,
        after[0]["experts_moved"] - before[0]["experts_moved"],
        sum(new["bytes_received"] - old["bytes_received"] for old, new in zip(before, after, strict=True)),
        time.monotonic() - started_at_s,
    )


async def _call_ranks(call: Call, method: RankMethod, *arguments: Any) -> list[Any]:
    """Return the answer of each rank's experts; raise ExpertPlacementError if one refuses."""
    answers = await call("eldr_experts", args=(method, *arguments))
    for answer in answers:
        if isinstance(answer, str):
            raise ExpertPlacementError(answer)
    return answers


class EngineExperts:
    """The experts of an engine, distributed over its ranks.

    Args:
        call: `collective_rpc` of the engine's client.

    Attributes:
        status: the live placement and its counters as JSON types; empty before the first `refresh`.
    """

    def __init__(self, call: Call) -> None:
        self._rpc = call
        self._swapping = False
        self._slices_left: int | None = None  # of the swap under way; None while it is planned
        self.status: dict[str, Any] = {}

    async def refresh(self) -> None:
        """Update `status` from the ranks.

        Raises:
            RequestRefusedError: the engine's experts cannot be moved.
        """
        ranks = await self._rpc("eldr_experts", args=("status",))
        if isinstance(ranks[0], str):
            raise RequestRefusedError(ranks[0], status=400)
        self.status = {
            "placement": placement_id(ranks[0]["placement"], len(ranks)),
            "ranks": len(ranks),
            "slots": len(ranks[0]["placement"][0]),
            **{key: ranks[0][key] for key in ("replica_choice", "slices_left", "experts_moved")},
            **{key: sum(rank[key] for rank in ranks) for key in _SUMMED},
        }

    async def place(self, placement: ExpertPlacement, load: ArrayLike | None = None) -> dict[str, Any]:
        """Move the experts to a placement while the engine serves; return what was moved, JSON types.

        Raises:
            RequestRefusedError: the placement does not fit (400), or another swap is under way (409).
        """
        if self._swapping:
            left = self._slices_left
            progress = "" if left is None else f": {left} slices to come"
            raise RequestRefusedError(f"a swap of expert placements is under way{progress}", status=409)
        self._swapping = True
        self._slices_left = None
        try:
            result = await swap_placement(self._call, placement, load)
        except ExpertPlacementError as error:
            raise RequestRefusedError(str(error), status=400) from error
        finally:
            try:
                await self.refresh()  # a cancelled swap has moved some experts
            finally:
                self._swapping = False
        return {"placement": self.status["placement"], **asdict(result)}

    async def _call(self, method: str, args: tuple[Any, ...]) -> list[Any]:
        """Call a method of all ranks, and update `slices_left` in `status` from the answers."""
        answers = await self._rpc(method, args=args)
        if args[0] in ("begin", "move") and isinstance(answers[0], int):
            self.status["slices_left"] = self._slices_left = answers[0]
        return answers
