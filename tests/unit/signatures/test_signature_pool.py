"""When the signature pool fits tables to live traffic, and when it does not. Runs without Ray."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from samples import EXPERTS, sample, traffic
from tables import unit_table

from eldr_serve.errors import SwapRefused
from eldr_serve.experts.calibration_trace import CalibrationTrace
from eldr_serve.experts.routing_table import RoutingTable
from eldr_serve.router import pool_link as link
from eldr_serve.router.actor import DecodeRouter
from eldr_serve.router.messages import Restore
from eldr_serve.router.settings import RouterSettings
from eldr_serve.signatures import pool
from eldr_serve.signatures.coordinator import Coordinator, RouterView
from eldr_serve.signatures.settings import PoolSettings, SignatureOptions
from eldr_serve.signatures.window import SampleWindow, trace_of

OPTIONS = SignatureOptions(first_table=60, window=240, every_s=60.0)
POOL = PoolSettings("eldr", "decode-router:eldr", "m", OPTIONS)


class Pool:
    """A coordinator with a router and a window in this process, and a clock that stands still.

    Args:
        table: the table that the deployment configures.
    """

    def __init__(self, table: bytes | None = None, policy: str = "locality-band") -> None:
        settings = RouterSettings(model_id="m", policy=policy, table=table, pool=POOL)
        self.router = DecodeRouter(settings)
        self.now = 1000.0
        self.window = SampleWindow(OPTIONS.window)
        self.coordinator = Coordinator(POOL, self, self._trace, clock=lambda: self.now)
        self.meanwhile: Any = None  # called while a table is being fitted

    async def _trace(self) -> CalibrationTrace:
        if self.meanwhile is not None:
            self.meanwhile()
        return trace_of(self.window.samples, "m")

    async def look(self, status: dict[str, Any]) -> RouterView:
        return await self.router.pool_looks(status | {"samples": len(self.window), "share": 1.0})

    async def table(self) -> bytes | None:
        return (await self.router.settings()).table

    async def swap(self, table: bytes, view: RouterView, *, refit: bool) -> int | None:
        return await self.router.take_table(table, view.epoch, view.table_version, refit)

    async def looks(self, times: int = 2) -> None:
        """Poll like the actor; twice is enough to see a stable number of replicas."""
        for _ in range(times):
            self.coordinator.samples = len(self.window)
            await self.coordinator.look(self.coordinator.status())

    async def serve(self, workers: int) -> None:
        replicas = tuple(f"r{number}" for number in range(workers))
        self.router._state.restore(Restore("ingress", replicas))
        self.router._state.update_workers(replicas)

    @property
    def live(self) -> RoutingTable | None:
        file = self.router._state.settings.table
        return None if file is None else RoutingTable.from_bytes(file)

    @property
    def counters(self) -> Any:
        return self.router._state.counters


def serves(table: RoutingTable | None) -> list[int]:
    """Return the kind (see samples.py) of each worker's centroid."""
    assert table is not None
    cells = table.centroids.reshape(len(table.centroids), -1, EXPERTS).sum(axis=1)
    return [int(kind) for kind in cells.reshape(len(cells), -1, 2).sum(axis=2).argmax(axis=1)]


@pytest.fixture(autouse=True)
def actors(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Any]]:
    """Record the actors that would be started, without starting any."""
    done: list[tuple[str, Any]] = []
    monkeypatch.setattr(link, "start_pool", lambda settings: done.append(("start", settings)))
    monkeypatch.setattr(link, "end_pool", lambda settings, beyond=0: done.append((f"end {beyond}", settings)))
    return done


@pytest.mark.parametrize("policy", ["locality-band", "marginal-cost"])
async def test_the_first_table_is_made_of_enough_samples_under_every_policy(policy: str) -> None:
    found = Pool(policy=policy)
    await found.serve(2)
    found.window.add(traffic([0, 3], 59))
    await found.looks()
    assert found.live is None
    assert found.coordinator.status()["note"] == "no table yet: 59 of 60 samples"
    found.window.add(traffic([0, 3], 1, begin=59))
    await found.looks(1)
    assert sorted(serves(found.live)) == [0, 3]
    status = found.coordinator.status()
    assert status["table"] | {"version": 1, "samples": 60, "workers": 2} == status["table"]
    assert status["table"]["why"] == "first table for 2 decode replicas"
    assert status["table"]["held_out"]["experts_by_table"] < status["table"]["held_out"]["experts_by_load"]
    assert status["note"] == "no table yet: 60 of 60 samples"  # from the previous look
    await found.looks(1)
    assert found.coordinator.status()["note"] == "table version 1 is live"
    assert (await found.router.status())["signatures"]["table"] == status["table"]
    assert found.counters["refits"] == 0
    assert found.counters["table_swaps"] == 1


async def test_a_table_that_is_worse_than_load_is_refused_and_the_status_says_why() -> None:
    found = Pool()
    await found.serve(2)
    found.window.add(traffic([None], 120))  # requests without common structure
    await found.looks(4)
    assert found.live is None
    status = found.coordinator.status()
    assert status["tables_refused"] == 1  # not tried at every look
    assert "no better than load" in status["last_refusal"]["why"]
    assert status["last_refusal"]["why"] in status["note"]
    await found.looks(1)
    assert found.counters["tables_refused"] == 1
    with pytest.raises(SwapRefused, match="no better than load"):
        await found.coordinator.refit(found.coordinator.status())
    found.now += OPTIONS.every_s
    found.window.add(traffic([0, 3], 240, begin=500))
    await found.looks(1)
    assert sorted(serves(found.live)) == [0, 3]


async def test_a_refused_first_table_is_tried_again_once_there_are_half_as_many_samples_more() -> None:
    found = Pool()
    await found.serve(2)
    found.window.add(traffic([None], 60))
    await found.looks()
    found.window.add(traffic([0, 3], 29, begin=500))
    await found.looks()
    assert found.coordinator.status()["tables_refused"] == 1
    found.window.add(traffic([0, 3], 121, begin=600))
    await found.looks(1)
    assert sorted(serves(found.live)) == [0, 3]  # before every_s


async def test_drift_leads_to_a_refit() -> None:
    found = Pool()
    await found.serve(2)
    found.window.add(traffic([0, 3], 120))
    await found.looks()
    before = serves(found.live)
    found.now += OPTIONS.every_s
    await found.looks()
    assert found.counters["table_swaps"] == 1  # nothing has changed
    found.window.add(traffic([3, 6], 240, begin=500))
    await found.looks()
    assert found.counters["table_swaps"] == 1  # not before every_s
    found.now += OPTIONS.every_s
    await found.looks()
    assert found.counters["refits"] == 1
    assert "drifted" in found.coordinator.status()["table"]["why"]
    assert serves(found.live) == [3 if kind == 3 else 6 for kind in before]  # kind 3 kept its worker


async def test_scaling_leads_to_a_table_of_as_many_workers() -> None:
    found = Pool()
    await found.serve(2)
    found.window.add(traffic([0, 3, 6], 120))
    await found.looks()
    assert len(found.live.centroids) == 2
    await found.serve(3)
    await found.looks(1)
    assert len(found.live.centroids) == 2  # more replicas may be starting
    await found.looks(1)
    assert sorted(serves(found.live)) == [0, 3, 6]
    assert "3 decode replicas serve" in found.coordinator.status()["table"]["why"]


async def test_one_decode_replica_needs_no_table() -> None:
    found = Pool()
    await found.serve(1)
    found.window.add(traffic([0, 3], 120))
    await found.looks()
    assert found.live is None
    assert "a table needs 2 or more" in found.coordinator.status()["note"]
    with pytest.raises(SwapRefused, match="2 or more"):
        await found.coordinator.refit(found.coordinator.status())


async def test_a_table_of_an_operator_is_not_replaced_by_a_first_one() -> None:
    found = Pool(table=unit_table(2, num_experts=EXPERTS).to_bytes())
    await found.serve(2)
    found.window.add(traffic([0, 3], 31))
    await found.looks()
    assert found.router._state.settings.table_version == 1
    found.window.add(traffic([0, 3], 60, begin=31))
    found.now += OPTIONS.every_s
    await found.looks()  # but it is refitted on drift
    assert found.counters["refits"] == 1


async def test_before_an_ingress_has_restored_its_settings_nothing_is_made() -> None:
    """After a restart the router has no table; the ingresses hold the operator's table."""
    found = Pool()
    found.router._state.update_workers(("r0", "r1"))
    found.window.add(traffic([0, 3], 120))
    await found.looks(3)
    assert found.live is None
    assert "before the router has an ingress" in found.coordinator.status()["note"]
    await found.serve(2)
    await found.looks()
    assert found.live is not None


async def test_a_request_makes_a_whole_new_table_that_keeps_the_workers() -> None:
    found = Pool()
    await found.serve(2)
    with pytest.raises(SwapRefused, match="holds 0 samples and a table of 2 decode replicas needs 16"):
        await found.coordinator.refit(found.coordinator.status())
    found.window.add(traffic([0, 3], 60))
    await found.looks()
    before = serves(found.live)
    found.window.add(traffic([0, 3], 60, begin=60))
    found.coordinator.samples = 120
    made = await found.coordinator.refit(found.coordinator.status())
    assert (made["version"], made["samples"], made["why"]) == (2, 120, "requested")
    assert serves(found.live) == before


async def test_a_table_that_somebody_swaps_in_meanwhile_stays() -> None:
    found = Pool()
    await found.serve(2)
    found.window.add(traffic([0, 3], 60))
    file = unit_table(2, num_experts=EXPERTS).to_bytes()
    found.meanwhile = lambda: found.router._state.swap_table(file)
    await found.looks()
    assert found.router._state.settings.table == file


async def test_a_table_of_another_shape_than_the_engines_is_refused_by_the_router() -> None:
    found = Pool()
    await found.serve(2)
    await found.router.expect_counts(4, 8)
    found.window.add(traffic([0, 3], 60))
    await found.looks()
    assert found.live is None
    assert "but the prefill engines report 4 x 8" in found.coordinator.status()["last_refusal"]["why"]


async def test_samples_of_another_shape_than_the_live_table_refit_nothing() -> None:
    found = Pool(table=unit_table(2).to_bytes())
    await found.serve(2)
    found.window.add(traffic([0, 3], 60))
    await found.looks()
    assert found.counters["table_swaps"] == 0
    assert "the samples have 2 x 16" in found.coordinator.status()["last_refusal"]["why"]


async def test_samples_are_taken_while_a_table_is_made() -> None:
    found = Pool()
    await found.serve(2)
    found.window.add(traffic([0, 3], 60))
    making, go_on = asyncio.Event(), asyncio.Event()

    async def slow(function: Any, *arguments: Any) -> Any:
        making.set()
        await go_on.wait()
        return await asyncio.to_thread(function, *arguments)

    found.coordinator._fit = slow
    looking = asyncio.create_task(found.looks())
    await making.wait()
    found.window.add([sample("late")])
    await found.looks(1)  # a concurrent look fits no second table
    go_on.set()
    await looking
    assert found.coordinator.status()["table"]["samples"] == 60


async def test_a_changed_deployment_starts_and_ends_actors(actors: list[tuple[str, Any]]) -> None:
    settings = RouterSettings(model_id="m", pool=POOL)
    router = DecodeRouter(settings)
    await router._pool._changing
    fewer = PoolSettings("eldr", POOL.router, "m", OPTIONS.model_copy(update={"actors": 3}))
    for changed in (fewer, POOL, POOL, None):
        await router.configure(settings.model_copy(update={"pool": changed}))
        await router._pool._changing
    assert [what for what, _ in actors] == [
        "start", "end 3", "start", "end 1", "start", "end 0",
    ]  # fmt: skip
    assert (await router.status())["signatures"] is None


async def test_the_status_says_when_the_pool_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    found = Pool()
    await found.serve(2)
    await found.looks(1)
    assert (await found.router.status())["signatures"]["note"].startswith("no table")
    monkeypatch.setattr(link, "_AWAY_S", 0.0)
    signatures = (await found.router.status())["signatures"]
    assert "has not answered" in signatures["note"]
    assert signatures["actors"] == 0


async def test_an_actor_that_is_away_costs_its_samples_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings = PoolSettings("eldr", "r", "m", OPTIONS.model_copy(update={"actors": 3}))
    first, second = (pool.SignaturePool(settings, index) for index in (0, 1))
    for task in [*first._tasks, *second._tasks]:
        task.cancel()
    await first.add(traffic([0], 5))
    await second.add([*traffic([3], 5, begin=5), sample("x", shape=(1, 4))])

    def find(name: str) -> Any:
        if name.endswith(":2"):
            raise ValueError("no such actor")
        return _Handle(second)

    monkeypatch.setattr(pool, "find_actor", find)
    await first._ask_all()
    assert (first._coordinator.samples, first._alive) == (10, 2)
    assert list(first._refused.values()) == [1]
    trace = CalibrationTrace.from_bytes(await first.trace("t", 50))
    assert len(trace.ids) == 10
    assert await second.add([]) == 1.0
    await first.look(settings, True)
    assert first._share.all is False


class _Handle:
    """A local stand-in for an actor handle."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._actor, name)
        return type("Method", (), {"remote": staticmethod(method)})


def test_the_options_name_what_is_wrong() -> None:
    with pytest.raises(ValueError, match="first_table"):
        SignatureOptions(first_table=3)
    with pytest.raises(ValueError, match="write `signatures` beside `router`"):
        RouterSettings(pool={"application": "eldr"})
    assert np.isfinite(OPTIONS.rate)
