"""The expert placement of a replica's engine, by PLACE_EXPERTS calls or by the replica's position."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import msgspec
from ray import serve
from ray.exceptions import ActorDiedError, RayError

from eldr_serve.actors import find_actor
from eldr_serve.engine.experts_change import ExpertPlacementOfPosition, ExpertsChange
from eldr_serve.engine.protocol import MovesExperts
from eldr_serve.errors import RequestRefusedError

logger = logging.getLogger(__name__)

_PERIOD_S = 2.0  # time between two questions to the router
_MAX_PERIOD_S = 60.0  # each refusal of a placement by the engine doubles the time, up to this


async def place_experts(engine: MovesExperts, body: bytes) -> bytes:
    """Apply the placement of the body to the engine; return the cost of the swap, as msgpack."""
    change, placement = ExpertsChange.parse(body)
    load = placement.expected_tokens if change.load is None else change.load
    return msgspec.msgpack.encode(await engine.place_experts(placement, load))


class ExpertPlacementFollower:
    """Gives an engine the expert placement of its replica's position.

    It asks the router for the position, and moves the experts only when the position or its placement
    changes, so that a placement which an operator loads by hand stays until then.

    Args:
        router_name: name of the router's actor.

    Attributes:
        status: JSON types: `position` (None: unknown so far), `placements_applied` and `placements_refused`,
            both since the start, and `last_refusal`, the sentence (None after a success).
    """

    def __init__(self, engine: MovesExperts, router_name: str) -> None:
        self._engine = engine
        self._router_name = router_name
        self._digest = ""  # digest of the placement that the engine took last
        self.status: dict[str, Any] = {
            "position": None,
            "placements_applied": 0,
            "placements_refused": 0,
            "last_refusal": None,
        }

    async def run(self) -> None:
        """Follow the position until cancelled; requests are served meanwhile."""
        router: Any = None  # an actor's handle
        period_s = _PERIOD_S
        while True:
            await asyncio.sleep(period_s)
            try:
                if router is None:  # the look-up needs a thread, since it blocks while GCS is unavailable
                    router = await asyncio.to_thread(find_actor, self._router_name)
                replica = serve.get_replica_context().replica_id.unique_id
                answer = await router.expert_placement_of_position.remote(replica, self._digest)
            except (ValueError, RayError) as error:  # the router is unavailable
                if isinstance(error, ActorDiedError):  # this is final: a restarted actor keeps its handle
                    router = None
                logger.info("the position of this replica is unknown: %r", error)
                continue
            is_refused = answer is not None and not await self._follow(answer)
            period_s = min(2 * period_s, _MAX_PERIOD_S) if is_refused else _PERIOD_S

    async def _follow(self, answer: ExpertPlacementOfPosition) -> bool:
        """Apply the placement unless the engine has it; return False if the engine refuses it."""
        self.status["position"] = answer.position
        if answer.body is None:
            return True
        try:
            await place_experts(self._engine, answer.body)
        except RequestRefusedError as error:
            self.status["placements_refused"] += 1
            if str(error) != self.status["last_refusal"]:
                logger.warning("the expert placement of position %d is refused: %s", answer.position, error)
                self.status["last_refusal"] = str(error)
            return False
        self._digest = answer.digest
        self.status["placements_applied"] += 1
        self.status["last_refusal"] = None
        return True
