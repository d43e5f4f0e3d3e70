"""Query and change the expert placement of a running engine, from its replica."""

from __future__ import annotations

from typing import Any

from numpy.typing import ArrayLike

from eldr_serve.engine.vllm.ep.swap import Call, PlacementError, swap_placement
from eldr_serve.errors import Refused
from eldr_serve.experts.placement import ExpertPlacement, placement_id

_SUMMED = ("weight_bytes", "replica_bytes", "slice_bytes", "bytes_received")  # summed over all ranks


class HeldExperts:
    """The experts of an engine, distributed over its ranks.

    Args:
        call: `collective_rpc` of the engine's client.

    Attributes:
        status: see protocol.Engine.experts; empty before the first `refresh`.
    """

    def __init__(self, call: Call) -> None:
        self._rpc = call
        self._swapping = False
        self.status: dict[str, Any] = {}

    async def refresh(self) -> None:
        """Update `status` from the ranks.

        Raises:
            Refused: the engine's experts cannot be moved.
        """
        ranks = await self._rpc("eldr_experts", args=("status",))
        if isinstance(ranks[0], str):
            raise Refused(ranks[0], status=400)
        self.status = {
            "placement": placement_id(ranks[0]["placement"], len(ranks)),
            "ranks": len(ranks),
            "slots": len(ranks[0]["placement"][0]),
            **{key: ranks[0][key] for key in ("replica_choice", "slices_left", "experts_moved")},
            **{key: sum(rank[key] for rank in ranks) for key in _SUMMED},
        }

    async def place(self, placement: ExpertPlacement, load: ArrayLike | None = None) -> dict[str, Any]:
        """See protocol.Engine.place_experts."""
        if self._swapping:
            raise Refused(
                f"a swap of expert placements is under way: {self.status['slices_left']} slices to come",
                status=409,
            )
        self._swapping = True
        try:
            swapped = await swap_placement(self._call, placement, load)
        except PlacementError as error:
            raise Refused(str(error), status=400) from error
        finally:
            try:
                await self.refresh()  # a cancelled swap has moved some experts
            finally:
                self._swapping = False
        return {
            "placement": self.status["placement"], "slices": swapped.slices, "experts": swapped.experts,
            "received_bytes": swapped.received_bytes, "seconds": swapped.seconds,
        }  # fmt: skip

    async def _call(self, method: str, args: tuple[Any, ...]) -> list[Any]:
        """Call a method of all ranks, and update `slices_left` in `status` from the answers."""
        answers = await self._rpc(method, args=args)
        if args[0] in ("begin", "move") and isinstance(answers[0], int):
            self.status["slices_left"] = answers[0]
        return answers
