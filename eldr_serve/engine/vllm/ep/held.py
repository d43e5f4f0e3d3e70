"""What the ranks of a running engine hold, and a new placement for them: the engine's side of a swap."""

from __future__ import annotations

from typing import Any

from numpy.typing import ArrayLike

from eldr_serve.engine.vllm.ep.swap import Call, PlacementError, swap_placement
from eldr_serve.errors import Refused
from eldr_serve.expert_placement import ExpertPlacement, placement_id

_SUMMED = ("weight_bytes", "replica_bytes", "slice_bytes", "bytes_received")  # of all ranks


class HeldExperts:
    """The experts of an engine whose ranks share them.

    Args:
        call: `collective_rpc` of the engine's client.
    """

    def __init__(self, call: Call) -> None:
        self._rpc = call
        self._swapping = False
        self.status: dict[str, Any] = {}  # see protocol.Engine.experts

    async def look(self) -> None:
        """Ask the ranks what they hold."""
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
            swapped = await swap_placement(self._followed, placement, load)
        except PlacementError as error:
            raise Refused(str(error), status=400) from error
        finally:
            try:
                await self.look()  # a swap that was cancelled has moved some
            finally:
                self._swapping = False
        return {
            "placement": self.status["placement"], "slices": swapped.slices, "experts": swapped.experts,
            "received_bytes": swapped.received_bytes, "seconds": swapped.seconds,
        }  # fmt: skip

    async def _followed(self, method: str, args: tuple[Any, ...]) -> list[Any]:
        answers = await self._rpc(method, args=args)
        if args[0] in ("begin", "move") and isinstance(answers[0], int):
            self.status["slices_left"] = answers[0]
        return answers
