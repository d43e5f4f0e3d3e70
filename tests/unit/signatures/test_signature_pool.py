"""When the signature pool fits tables to live traffic, and when it does not. Runs without Ray."""

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from eldr_serve.errors import SwapRefusedError
from eldr_serve.experts.calibration_trace import CalibrationTrace
from eldr_serve.experts.routing_table import RoutingTable
from eldr_serve.router import pool_link as link
from eldr_serve.router.actor import DecodeRouter
from eldr_serve.router.settings import RouterSettings
from eldr_serve.router_protocol.messages import Restore
from eldr_serve.signatures import pool
from eldr_serve.signatures.coordinator import Coordinator, RouterView
from eldr_serve.signatures.settings import PoolSettings, SignatureOptions
from eldr_serve.signatures.window import SampleWindow, trace_of_samples
from tests.support.clock import Clock
from tests.support.samples import EXPERTS, sample, traffic
from tests.support.tables import unit_table

OPTIONS = SignatureOptions(first_table=60, window=240, every_s=60.0)
POOL = PoolSettings("eldr", "decode-router:eldr", "m", OPTIONS)


class LocalPool:
    """A coordinator with a router and a sample window in this process, and a clock that the test sets.

    Args:
        samples: number of samples in the window at the start.
        kinds: their kinds.
        table: the configured routing table.
    """

    def __init__(
        self,
        samples: int = 0,
        kinds: Sequence[int | None] = (0, 3),
        *,
        workers: int = 2,
        table: bytes | None = None,
        policy: str = "locality-band",
    ) -> None:
        settings = RouterSettings(model_id="m", policy=policy, table=table, pool=POOL)
        self.router = DecodeRouter(settings)
        self.clock = Clock(1000.0)
        self.window = SampleWindow(OPTIONS.window)
        self.coordinator = Coordinator(POOL, self, self._trace, clock=self.clock)
        self.during_fit: Any = None  # callback
        self.window.add(traffic(kinds, samples))
        if workers:
            self.serve(workers)

    async def _trace(self) -> CalibrationTrace:
        if self.during_fit is not None:
            self.during_fit()
        return trace_of_samples(self.window.samples, "m")

    async def report_status(self, status: dict[str, Any]) -> RouterView:
        return await self.router.report_pool(status | {"samples": len(self.window), "share": 1.0})

    async def table(self) -> bytes | None:
        return (await self.router.settings()).table

    async def swap(self, table: bytes, view: RouterView, *, refit: bool) -> int | None:
        return await self.router.swap_fitted_table(table, view.epoch, view.table_version, refit)

    async def poll(self, times: int = 2) -> None:
        """Poll like the actor. Two polls see a stable number of replicas."""
        for _ in range(times):
            self.coordinator.samples = len(self.window)
            await self.coordinator.poll(self.coordinator.status())

    def serve(self, workers: int) -> None:
        replicas = tuple(f"r{number}" for number in range(workers))
        self.router._state.restore_from_ingress(Restore("ingress", replicas))
        self.router._state.ingresses.set_reachable_workers("ingress", replicas)

    @property
    def live(self) -> RoutingTable | None:
        file = self.router._state.settings.table
        return None if file is None else RoutingTable.from_bytes(file)

    @property
    def status(self) -> dict[str, Any]:
        return self.coordinator.status()

    async def refit(self) -> Any:
        return await self.coordinator.refit(self.coordinator.status)

    @property
    def counters(self) -> Any:
        return self.router._state.counters


def kinds(table: RoutingTable | None) -> list[int]:
    """Return the kind (see samples.py) of each worker's centroid."""
    assert table is not None
    cells = table.centroids.reshape(len(table.centroids), -1, EXPERTS).sum(axis=1)
    return [int(kind) for kind in cells.reshape(len(cells), -1, 2).sum(axis=2).argmax(axis=1)]


@pytest.fixture(autouse=True)
def actors(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record which actors would start and end, without starting any."""
    calls: list[str] = []
    monkeypatch.setattr(link, "start_pool", lambda settings: calls.append("start"))
    monkeypatch.setattr(link, "end_pool", lambda settings, beyond=0: calls.append(f"end {beyond}"))
    return calls


@pytest.mark.parametrize("policy", ["locality-band", "marginal-cost"])
async def test_the_first_table_is_fitted_from_enough_samples_under_any_policy(policy: str) -> None:
    local = LocalPool(59, policy=policy)
    await local.poll()
    assert local.live is None
    assert local.status["note"] == "no table yet: 59 of 60 samples"
    local.window.add(traffic([0, 3], 1, begin=59))
    await local.poll(1)
    assert sorted(kinds(local.live)) == [0, 3]
    status = local.status
    assert status["table"] | {"version": 1, "samples": 60, "workers": 2} == status["table"]
    assert status["table"]["why"] == "first table for 2 decode replicas"
    assert status["table"]["held_out"]["experts_by_table"] < status["table"]["held_out"]["experts_by_load"]
    assert status["note"] == "no table yet: 60 of 60 samples"  # this is the note of the previous poll
    await local.poll(1)
    assert local.status["note"] == "table version 1 is live"
    assert (await local.router.status())["signatures"]["table"] == status["table"]
    assert local.counters["refits"] == 0
    assert local.counters["table_swaps"] == 1


async def test_a_table_no_better_than_load_is_refused_with_a_reason_in_the_status() -> None:
    local = LocalPool(120, [None])  # requests without common structure
    await local.poll(4)
    assert local.live is None
    status = local.status
    assert status["tables_refused"] == 1  # it is not tried again at each poll
    assert "no better than load" in status["last_refusal"]["why"]
    assert status["last_refusal"]["why"] in status["note"]
    await local.poll(1)
    assert local.counters["tables_refused"] == 1
    with pytest.raises(SwapRefusedError, match="no better than load"):
        await local.refit()
    local.clock.now += OPTIONS.every_s
    local.window.add(traffic([0, 3], 240, begin=500))
    await local.poll(1)
    assert sorted(kinds(local.live)) == [0, 3]


async def test_a_refused_first_table_is_fitted_again_after_half_as_many_new_samples() -> None:
    local = LocalPool(60, [None])
    await local.poll()
    local.window.add(traffic([0, 3], 29, begin=500))
    await local.poll()
    assert local.status["tables_refused"] == 1
    local.window.add(traffic([0, 3], 121, begin=600))
    await local.poll(1)
    assert sorted(kinds(local.live)) == [0, 3]  # it does not wait for every_s


async def test_drift_leads_to_a_refit() -> None:
    local = LocalPool(120)
    await local.poll()
    before = kinds(local.live)
    local.clock.now += OPTIONS.every_s
    await local.poll()
    assert local.counters["table_swaps"] == 1  # nothing has changed
    local.window.add(traffic([3, 6], 240, begin=500))
    await local.poll()
    assert local.counters["table_swaps"] == 1  # a second swap waits for every_s
    local.clock.now += OPTIONS.every_s
    await local.poll()
    assert local.counters["refits"] == 1
    assert "drifted" in local.status["table"]["why"]
    assert kinds(local.live) == [3 if kind == 3 else 6 for kind in before]  # kind 3 kept its worker


async def test_scaling_leads_to_a_table_for_the_new_number_of_workers() -> None:
    local = LocalPool(120, [0, 3, 6])
    await local.poll()
    assert len(local.live.centroids) == 2
    local.serve(3)
    await local.poll(1)
    assert len(local.live.centroids) == 2  # more replicas may be starting
    await local.poll(1)
    assert sorted(kinds(local.live)) == [0, 3, 6]
    assert "3 decode replicas serve" in local.status["table"]["why"]


async def test_one_decode_replica_needs_no_table() -> None:
    local = LocalPool(120, workers=1)
    await local.poll()
    assert local.live is None
    assert "a table needs 2 or more" in local.status["note"]
    with pytest.raises(SwapRefusedError, match="2 or more"):
        await local.refit()


async def test_a_configured_table_is_replaced_only_by_a_refit() -> None:
    local = LocalPool(31, table=unit_table(2, num_experts=EXPERTS).to_bytes())
    await local.poll()
    assert local.router._state.settings.table_version == 1
    local.window.add(traffic([0, 3], 60, begin=31))
    local.clock.now += OPTIONS.every_s
    await local.poll()  # drift leads to a refit
    assert local.counters["refits"] == 1


async def test_no_table_is_fitted_before_an_ingress_has_restored_its_settings() -> None:
    """After a restart the router has no table. The ingresses hold the operator's table."""
    local = LocalPool(120, workers=0)
    local.router._state.ingresses.set_reachable_workers("ingress", ("r0", "r1"))
    await local.poll(3)
    assert local.live is None
    assert "before the router has an ingress" in local.status["note"]
    local.serve(2)
    await local.poll()
    assert local.live is not None


async def test_a_requested_refit_keeps_each_workers_kind() -> None:
    local = LocalPool()
    with pytest.raises(SwapRefusedError, match="holds 0 samples and a table of 2 decode replicas needs 16"):
        await local.refit()
    local.window.add(traffic([0, 3], 60))
    await local.poll()
    before = kinds(local.live)
    local.window.add(traffic([0, 3], 60, begin=60))
    local.coordinator.samples = 120
    refit = await local.refit()
    assert (refit["version"], refit["samples"], refit["why"]) == (2, 120, "requested")
    assert kinds(local.live) == before


async def test_a_refit_that_is_requested_during_an_automatic_fit_replaces_its_table() -> None:
    local = LocalPool(60)
    requested: list[asyncio.Task[Any]] = []

    def request() -> None:
        local.during_fit = None
        requested.append(asyncio.create_task(local.refit()))

    local.during_fit = request
    await local.poll()
    refit = await requested[0]
    assert (refit["version"], refit["why"]) == (2, "requested")


async def test_a_table_swapped_in_during_a_fit_stays() -> None:
    local = LocalPool(60)
    file = unit_table(2, num_experts=EXPERTS).to_bytes()
    local.during_fit = lambda: local.router._state.live_settings.swap_table(file)
    await local.poll()
    assert local.router._state.settings.table == file
    local.during_fit = lambda: setattr(local.router._state, "epoch", "another")
    with pytest.raises(SwapRefusedError, match="has another table, or was restarted or redeployed"):
        await local.refit()


async def test_the_router_refuses_a_table_of_another_shape_than_the_engines() -> None:
    local = LocalPool(60)
    await local.router.expect_counts(4, 8)
    await local.poll()
    assert local.live is None
    assert "but the prefill engines report 4 x 8" in local.status["last_refusal"]["why"]


async def test_samples_of_another_shape_than_the_live_table_cause_no_refit() -> None:
    local = LocalPool(60, table=unit_table(2).to_bytes())
    await local.poll()
    assert local.counters["table_swaps"] == 0
    assert "the samples have 2 x 16" in local.status["last_refusal"]["why"]


async def test_samples_are_accepted_during_a_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    local = LocalPool(60)
    making, go_on, to_thread = asyncio.Event(), asyncio.Event(), asyncio.to_thread

    async def slow(function: Any, *arguments: Any) -> Any:
        making.set()
        await go_on.wait()
        return await to_thread(function, *arguments)

    monkeypatch.setattr(asyncio, "to_thread", slow)
    polling = asyncio.create_task(local.poll())
    await making.wait()
    local.window.add([sample("late")])
    await local.poll(1)  # a concurrent poll fits no second table
    go_on.set()
    await polling
    assert local.status["table"]["samples"] == 60


async def test_a_changed_deployment_starts_and_ends_actors(actors: list[str]) -> None:
    settings = RouterSettings(model_id="m", pool=POOL)
    router = DecodeRouter(settings)
    await router._pool._changing
    fewer = PoolSettings("eldr", POOL.router, "m", OPTIONS.model_copy(update={"actors": 3}))
    for changed in (fewer, POOL, POOL, None):
        await router.configure(settings.model_copy(update={"pool": changed}))
        await router._pool._changing
    assert actors == ["start", "end 3", "start", "end 1", "start", "end 0"]
    assert (await router.status())["signatures"] is None


async def test_the_status_shows_that_the_pool_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    local = LocalPool()
    await local.poll(1)
    assert (await local.router.status())["signatures"]["note"].startswith("no table")
    monkeypatch.setattr(link, "_UNREACHABLE_S", 0.0)
    signatures = (await local.router.status())["signatures"]
    assert "has not answered" in signatures["note"]
    assert signatures["actors"] == 0


async def test_an_unreachable_actor_loses_only_its_own_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = PoolSettings("eldr", "r", "m", OPTIONS.model_copy(update={"actors": 3}))
    first, second = (pool.SignaturePool(settings, index) for index in (0, 1))
    for task in [*first._tasks, *second._tasks]:
        task.cancel()
    await first.add(traffic([0], 5))
    await second.add([*traffic([3], 5, begin=5), sample("x", shape=(1, 4))])

    methods = {name: SimpleNamespace(remote=getattr(second, name)) for name in ("samples", "apply_settings")}
    handle = SimpleNamespace(**methods)

    def find(name: str) -> Any:
        if name.endswith(":2"):
            raise ValueError("no such actor")
        return handle

    monkeypatch.setattr(pool, "find_actor", find)
    await first._poll_actors()
    assert (first._coordinator.samples, first._num_alive) == (10, 2)
    assert list(first._refused.values()) == [1]
    trace = CalibrationTrace.from_bytes(await first.trace("t", 50))
    assert len(trace.ids) == 10
    assert await second.add([]) == 1.0
    await first.apply_settings(settings, True)
    assert first._share.sample_all is False


async def test_actors_without_a_router_exit_even_while_actor_0_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = PoolSettings("eldr", "router", "m", OPTIONS.model_copy(update={"actors": 2}))
    clock, exits = Clock(1000.0), []
    monkeypatch.setattr(pool.time, "monotonic", clock)
    first, second = actors = [pool.SignaturePool(settings, index) for index in (0, 1)]
    for task in [*first._tasks, *second._tasks]:
        task.cancel()
    view = RouterView("e", "m", 0, 0, 0, False, settings)

    async def report(status: dict[str, Any]) -> RouterView:
        if clock.now > 2000.0:
            raise pool.RayError
        return view

    handles = {
        "router": SimpleNamespace(report_pool=SimpleNamespace(remote=report)),
        pool.pool_actor_name("eldr", 1): SimpleNamespace(
            apply_settings=SimpleNamespace(remote=second.apply_settings)
        ),
    }
    monkeypatch.setattr(pool, "find_actor", handles.__getitem__)
    current = SimpleNamespace(current_actor="this actor")
    monkeypatch.setattr(pool.ray, "get_runtime_context", lambda: current)
    monkeypatch.setattr(pool.ray, "kill", exits.append)

    for now in (1800.0, 2000.0, 2800.0):
        clock.now = now
        if now > 2000.0:
            with pytest.raises(pool.RayError):
                await first._poll()
        else:
            await first._poll()
    assert [clock.now - actor._last_contact_at_s for actor in actors] == [800.0, 800.0]
    clock.now = 2901.0
    for actor in actors:
        await asyncio.wait_for(actor._exit_without_router(), 1)
    assert exits == ["this actor"] * 2


async def test_a_pool_reports_as_unreachable_only_a_router_or_actor(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    first = pool.SignaturePool(POOL)
    for task in first._tasks:
        task.cancel()
    monkeypatch.setattr(pool, "find_actor", Mock(side_effect=ValueError("no actor")))
    monkeypatch.setattr(asyncio, "sleep", Mock(side_effect=asyncio.CancelledError))
    with pytest.raises(asyncio.CancelledError):
        await first._coordinate()
    assert caplog.messages == ["the router or an actor cannot be reached: no actor"]
    monkeypatch.setattr(first, "_poll", Mock(side_effect=ValueError("another error")))
    with pytest.raises(ValueError, match="another error"):
        await first._coordinate()


async def test_samples_that_form_no_trace_are_a_refusal() -> None:
    local = LocalPool(60)
    local.during_fit = Mock(side_effect=ValueError("the samples cannot be used"))
    await local.poll()
    assert local.status["last_refusal"]["why"] == "the samples cannot be used"
    with pytest.raises(SwapRefusedError, match="the samples cannot be used"):
        await local.refit()


def test_invalid_options_are_named() -> None:
    with pytest.raises(ValueError, match="first_table"):
        SignatureOptions(first_table=3)
    with pytest.raises(ValueError, match="write `signatures` beside `router`"):
        RouterSettings(pool={"application": "eldr"})
    assert np.isfinite(OPTIONS.rate)
