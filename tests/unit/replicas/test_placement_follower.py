"""A decode replica moves its experts to the placement of its position, and serves meanwhile."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import ArrayLike
from ray.exceptions import ActorDiedError, ActorUnavailableError

from eldr_serve.engine.experts_change import ExpertPlacementOfPosition, ExpertsChange
from eldr_serve.engine.fake import FakeEngine
from eldr_serve.engine.report_fields import EXPERTS
from eldr_serve.errors import RequestRefusedError
from eldr_serve.experts.expert_placement import ExpertPlacement
from eldr_serve.replicas import expert_placement, servers
from tests.support.channel_calls import read_all
from tests.support.engine_server import generate, serving
from tests.support.fake_router import wait_until

FIRST = ExpertPlacement(np.array([[0, 1, 2, 0]]), 2, 3, model="m", method="by hand")
SECOND = ExpertPlacement(np.array([[2, 1, 0, 0]]), 2, 3, model="m", method="by hand")


class MovableEngine(FakeEngine):
    """An engine that records the placements that it takes; the first calls raise `refusals`."""

    placements: list[str]
    refusals: list[Exception]

    async def place_experts(
        self, placement: ExpertPlacement, load: ArrayLike | None = None
    ) -> dict[str, Any]:
        if self.refusals:
            raise self.refusals.pop(0)
        self.placements.append(placement.id)
        return {"placement": placement.id}

    def expert_status(self) -> dict[str, Any] | None:
        return {"placement": self.placements[-1] if self.placements else "linear"}


async def start_engine(config: Any) -> MovableEngine:
    engine = await MovableEngine.start(config)
    assert isinstance(engine, MovableEngine)
    engine.placements, engine.refusals = [], []
    return engine


class PositionRouter:
    """A stand-in for the actor's handle, whose replica has `position` and `placement`; None: no position."""

    def __init__(self) -> None:
        self.position, self.placement = 0, FIRST
        self.has_position = True
        self.errors: list[Exception] = []
        self.digests: list[str] = []
        self.expert_placement_of_position = SimpleNamespace(remote=self.answer)

    async def answer(self, replica: str, digest: str) -> ExpertPlacementOfPosition | None:
        assert replica == "r0"
        self.digests.append(digest)
        if self.errors:
            raise self.errors.pop(0)
        if not self.has_position:
            return None
        new_digest = self.placement.id
        body = None if digest == new_digest else ExpertsChange.encode(self.placement)
        return ExpertPlacementOfPosition(self.position, new_digest, body)


@asynccontextmanager
async def following(
    monkeypatch: pytest.MonkeyPatch, router: PositionRouter, look_ups: list[str] | None = None
) -> AsyncIterator[tuple[Any, Any]]:
    """Run a decode replica r0 that asks this router for its position."""

    def find(name: str) -> Any:
        if look_ups is not None:
            look_ups.append(name)
        return router

    monkeypatch.setattr(expert_placement, "_PERIOD_S", 0.001)
    monkeypatch.setattr(expert_placement, "_MAX_PERIOD_S", 0.004)
    monkeypatch.setattr(expert_placement, "find_actor", find)
    context = SimpleNamespace(replica_id=SimpleNamespace(unique_id="r0"))
    monkeypatch.setattr(expert_placement.serve, "get_replica_context", lambda: context)
    arguments: dict[str, Any] = {"router_name": "router", "follows_expert_placements": True}
    async with serving(servers.DecodeServer, start_engine=start_engine, **arguments) as served:
        yield served


async def ask_twice(router: PositionRouter) -> None:
    """Wait until the replica has asked the router twice more."""
    number = len(router.digests) + 2
    await wait_until(lambda: len(router.digests) >= number)


async def test_a_replica_takes_the_placement_of_its_position_once(monkeypatch: pytest.MonkeyPatch) -> None:
    router = PositionRouter()
    router.has_position = False
    async with following(monkeypatch, router) as (server, channel):
        await ask_twice(router)
        assert server.report()[EXPERTS]["position"] is None
        router.has_position = True
        await wait_until(lambda: server._engine.placements)
        await ask_twice(router)
        assert server._engine.placements == [FIRST.id]
        assert server.report()[EXPERTS] == {
            "placement": FIRST.id,
            "position": 0,
            "placements_applied": 1,
            "placements_refused": 0,
            "last_refusal": None,
        }
        router.position, router.placement = 1, SECOND  # a restarted router gives another position
        await wait_until(lambda: len(server._engine.placements) == 2)
        await ask_twice(router)
        assert server._engine.placements == [FIRST.id, SECOND.id]
        _, tokens = await read_all(generate(channel, tokens=3))
        assert tokens == 3


async def test_a_refusal_is_logged_once_and_tried_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    router = PositionRouter()
    router.has_position = False
    async with following(monkeypatch, router) as (server, _):
        server._engine.refusals += [RequestRefusedError("a swap is under way", status=409)] * 3
        router.has_position = True
        await wait_until(lambda: server._engine.placements)
        assert server._engine.placements == [FIRST.id]
        await wait_until(lambda: server.report()[EXPERTS]["placements_applied"] == 1)
        assert server.report()[EXPERTS]["placements_refused"] == 3
        assert server.report()[EXPERTS]["last_refusal"] is None
    assert caplog.text.count("placement of position 0 is refused: a swap is under way") == 1


async def test_the_status_has_the_sentence_of_a_lasting_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    router = PositionRouter()
    router.has_position = False
    async with following(monkeypatch, router) as (server, channel):
        server._engine.refusals += [RequestRefusedError("it does not fit", status=400)] * 10_000
        router.has_position = True
        await wait_until(lambda: server.report()[EXPERTS]["placements_refused"] > 3)
        assert server.report()[EXPERTS]["last_refusal"] == "it does not fit"
        _, tokens = await read_all(generate(channel, tokens=3))  # the replica serves nevertheless
        assert tokens == 3


async def test_a_lost_router_is_looked_up_again_and_the_experts_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    router, look_ups = PositionRouter(), list[str]()
    async with following(monkeypatch, router, look_ups) as (server, _):
        await wait_until(lambda: server._engine.placements)
        router.errors += [ActorUnavailableError("test", None), ActorDiedError()]
        await wait_until(lambda: len(look_ups) == 2)
        await ask_twice(router)
        assert server._engine.placements == [FIRST.id]


async def test_other_replicas_ask_for_no_placement() -> None:
    async with serving(servers.DecodeServer, start_engine=start_engine, router_name="router") as (server, _):
        await asyncio.sleep(0)
        assert server.report()[EXPERTS] == {"placement": "linear"}
