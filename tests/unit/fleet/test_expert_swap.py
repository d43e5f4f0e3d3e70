"""An operator's expert placement reaches each decode engine, or an error names the reason in one sentence."""

import json
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import ArrayLike

from eldr_serve.channel import CallFailedError, ChannelLostError
from eldr_serve.engine.fake import FakeEngine
from eldr_serve.engine.methods import PLACE_EXPERTS
from eldr_serve.engine.report_fields import EXPERTS
from eldr_serve.errors import RequestRefusedError
from eldr_serve.experts.expert_placement import ExpertPlacement, placement_id
from eldr_serve.fleet.directory import ReplicaDirectory
from eldr_serve.fleet.expert_swap import place_on_replicas
from eldr_serve.replicas import servers
from eldr_serve.replicas.expert_placement import place_experts
from tests.support.engine_server import serving
from tests.support.fake_fleet import FakeFleet, Sent
from tests.support.ingress_app import KEY, running_app

PLACED = ExpertPlacement(np.array([[0, 1, 2, 0], [2, 1, 0, 1]]), 2, 3, model="m", method="by hand")


class Ranked(FakeEngine):
    """An engine that accepts any placement unless `refuses` is set."""

    held: ExpertPlacement | None = None
    load: Any = None
    refuses: Exception | None = None

    async def place_experts(
        self, placement: ExpertPlacement, load: ArrayLike | None = None
    ) -> dict[str, Any]:
        if self.refuses is not None:
            raise self.refuses
        self.held, self.load = placement, load
        return {"placement": placement.id, "slices": 1}

    def expert_status(self) -> dict[str, Any] | None:
        return {"placement": self.held.id if self.held else None, "slices_left": 0}


def body(placed: ExpertPlacement = PLACED, **others: Any) -> bytes:
    content, described = placed.files(Path("p.json")).values()
    return json.dumps({"map": json.loads(content), "meta": json.loads(described)} | others).encode()


@pytest.fixture
def engines() -> dict[str, Ranked]:
    return {name: object.__new__(Ranked) for name in ("r0", "r1")}


@pytest.fixture
def fleet(engines: dict[str, Ranked]) -> Any:
    async def answer(sent: Sent) -> AsyncIterator[Any]:
        assert sent.method == PLACE_EXPERTS
        yield await place_experts(engines[sent.replica], sent.body), 0

    return FakeFleet(answer, *engines)


async def test_all_or_named_decode_engines_get_a_placement(fleet: Any, engines: dict[str, Ranked]) -> None:
    results = await place_on_replicas(fleet, body(load=[[1.0, 2.0, 3.0]] * 2))
    assert results == {name: {"placement": PLACED.id, "slices": 1} for name in engines}
    for engine in engines.values():
        assert engine.held is not None
        assert np.array_equal(engine.held.physical_to_logical, PLACED.physical_to_logical)
        assert engine.load == [[1.0, 2.0, 3.0]] * 2
        engine.held = None
    assert list(await place_on_replicas(fleet, body(replicas=["r1"]))) == ["r1"]
    assert [engine.held is None for engine in engines.values()] == [True, False]


async def test_engines_get_the_placements_expected_tokens_unless_others_are_given(
    fleet: Any, engines: dict[str, Ranked]
) -> None:
    expected = np.arange(6.0).reshape(2, 3)
    await place_on_replicas(fleet, body(replace(PLACED, expected_tokens=expected), replicas=["r0"]))
    assert np.array_equal(engines["r0"].load, expected)
    load = [[1.0, 2.0, 3.0]] * 2
    await place_on_replicas(fleet, body(replace(PLACED, expected_tokens=expected), load=load))
    assert engines["r0"].load == engines["r1"].load == load


@pytest.mark.parametrize(
    ("error", "status", "sentence"),
    [
        (
            RequestRefusedError("a swap is under way", status=409),
            409,
            "r1: a swap is under way; already changed: r0",
        ),
        (ChannelLostError("gone"), 503, "r1: it was lost: gone; already changed: r0"),
    ],
)
async def test_the_first_engine_that_refuses_ends_the_change_and_is_named(
    fleet: Any, engines: dict[str, Ranked], error: Exception, status: int, sentence: str
) -> None:
    engines["r1"].refuses = error
    with pytest.raises(RequestRefusedError, match=sentence) as refused:
        await place_on_replicas(fleet, body())
    assert refused.value.status == status
    assert engines["r1"].held is None


@pytest.mark.parametrize(
    ("sent", "sentence"),
    [
        (b"[", "Invalid JSON"),
        (b"{}", "map: Field required"),
        (body(map={"physical_to_logical_map": [[0, 1, 2, 1]] * 2}), "is not the placement that meta"),
        (body(meta={}), "meta has invalid metadata"),
        (body(replicas=["r7"]), "no decode replica 'r7'"),
        (body(where="here"), "where: Extra inputs"),
        (body(load=[["much"]]), "load.0.0"),
    ],
)
async def test_an_invalid_placement_reaches_no_engine(fleet: Any, sent: bytes, sentence: str) -> None:
    with pytest.raises(RequestRefusedError, match=sentence) as refused:
        await place_on_replicas(fleet, sent)
    assert refused.value.status == 400
    assert not fleet.sent


async def test_a_placement_needs_the_admin_key() -> None:
    async with running_app() as app:
        assert (await app.put("/eldr/experts", None, content=body())).status_code == 401
        answer = await app.put("/eldr/experts", KEY, content=b"{}")
        assert answer.status_code == 400
        assert answer.json()["error"]["message"] == "map: Field required"
        assert not app.decode.sent


async def test_a_decode_replica_reports_its_placement() -> None:
    async with serving(servers.DecodeServer, start_engine=Ranked.start, router_name="router") as (
        server,
        channel,
    ):
        chunk = await channel.call(PLACE_EXPERTS, {"body": body()}).read()
        assert chunk is not None
        stats = server.report()
        assert stats[EXPERTS]["placement"] == PLACED.id
        directory = ReplicaDirectory()
        directory.update_reports({"r0": stats, "r1": {}})
        assert dict(directory.experts) == {"r0": stats[EXPERTS]}


async def test_an_engine_without_expert_parallelism_refuses_a_placement() -> None:
    async with serving(servers.DecodeServer, router_name="router") as (server, channel):
        with pytest.raises(CallFailedError, match="cannot be moved") as failure:
            await channel.call(PLACE_EXPERTS, {"body": body()}).read()
        assert failure.value.status == 400
        assert EXPERTS not in server.report()


def test_the_order_of_slots_on_a_rank_does_not_change_the_placement_id() -> None:
    rows = PLACED.physical_to_logical
    assert (
        PLACED.id
        == placement_id(rows[:, [1, 0, 3, 2]], 2)
        == placement_id([[0, 1, -1, 2, 0, -1], [2, 1, -1, 0, 1, -1]], 2)
    )
    assert PLACED.id != placement_id(rows[:, [2, 1, 0, 3]], 2)
