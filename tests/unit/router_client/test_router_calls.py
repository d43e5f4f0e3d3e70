"""Calls to a real router over its real channel, with a stand-in for the actor's handle."""

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest
import ray
from ray.actor import ActorHandle
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayError, RayTaskError

from eldr_serve.channel import CallFailedError, ChannelLostError
from eldr_serve.errors import SwapRefusedError
from eldr_serve.fleet.directory import ReplicaDirectory
from eldr_serve.router.actor import DecodeRouter
from eldr_serve.router.settings import RouterSettings
from eldr_serve.router_client.calls import RouterCalls
from eldr_serve.router_client.client import RouterClient
from eldr_serve.router_protocol import methods
from eldr_serve.router_protocol.messages import LiveSettings
from tests.support.fake_router import wait_until
from tests.support.tables import counts_for, request, unit_table


class Cluster:
    """A stand-in for Ray, which looks up the actor and can kill it."""

    def __init__(self) -> None:
        self.router = DecodeRouter(RouterSettings(model_id="m", policy="locality-band"))
        self.error: Exception | None = None  # error that the handle raises
        self.look_ups = self.addresses = 0
        self.address = self
        self.configure = SimpleNamespace(remote=lambda *args: self.router.configure(*args))

    def find(self) -> Any:
        self.look_ups += 1
        return self

    async def remote(self) -> Any:
        self.addresses += 1
        if self.error is not None:
            raise self.error
        return await self.router.address()

    async def end(self) -> None:
        for task in self.router._tasks:
            task.cancel()
        if self.router._channel_server is not None:
            await (await self.router._channel_server)[1].stop()

    async def restart(self) -> None:
        await self.end()
        self.router = DecodeRouter(RouterSettings(model_id="m", policy="random"))


@asynccontextmanager
async def run_cluster(settings: RouterSettings | None = None) -> AsyncIterator[tuple[Cluster, RouterCalls]]:
    cluster = Cluster()
    calls = RouterCalls(cluster.find, settings)
    try:
        yield cluster, calls
    finally:
        calls.close()
        await cluster.end()


async def test_calls_return_the_actors_results_and_raise_its_errors() -> None:
    async with run_cluster() as (cluster, calls):
        table = unit_table(3).to_bytes()
        assert (await calls.call(methods.SWAP_TABLE, methods.TableArguments(table))).table == table
        with pytest.raises(CallFailedError, match="unknown policy 'nonsense'") as refused:
            await calls.call(methods.SET_POLICY, methods.PolicyArguments("nonsense", {}))
        assert refused.value.status == 400
        for name in ("observe_steps", "nonsense"):
            method = methods.RouterMethod(name, methods.NoArguments, type(None))
            with pytest.raises(CallFailedError, match=f"no method '{name}'"):
                await calls.call(method, methods.NoArguments())
        with pytest.raises(CallFailedError, match="Expected `str`"):
            await calls.call(methods.SET_POLICY, methods.PolicyArguments(1, {}))  # type: ignore[arg-type]
        settings = await calls.call(methods.SETTINGS, methods.NoArguments())
        assert (settings.policy, settings.table) == ("locality-band", table)
        assert cluster.look_ups == cluster.addresses == 1


async def test_a_large_table_is_returned_whole() -> None:
    async with run_cluster() as (_, calls):
        table = unit_table(900, num_layers=48, num_experts=128).to_bytes()
        assert len(table) > 2 * 2**20
        await calls.call(methods.SWAP_TABLE, methods.TableArguments(table))
        assert (await calls.call(methods.SETTINGS, methods.NoArguments())).table == table


@asynccontextmanager
async def running_client(
    settings: RouterSettings | None = None,
) -> AsyncIterator[tuple[Cluster, RouterCalls, RouterClient]]:
    async with run_cluster(settings) as (cluster, calls):
        directory = ReplicaDirectory()
        directory.publish({"r0": {}, "r1": {}})
        client = RouterClient(calls, lambda: directory.known_workers, timeout_s=5.0)
        client.start()
        yield cluster, calls, client
        await client.stop()


async def test_a_router_client_continues_after_a_restart() -> None:
    async with running_client() as (cluster, _, client):
        await client.operator.swap_table(unit_table(2).to_bytes())
        for name in "ab":
            lease = await client.place(request(name), counts_for(1))
        assert (lease.worker, lease.reason) == ("r1", "locality-band")
        await cluster.restart()
        lease = await client.place(request("c"), counts_for(0))
        await wait_until(lambda: set(cluster.router._state.placer.running) == set("abc"))
        assert client.settings is not None
        assert client.settings.policy == "locality-band"  # the client has restored it


async def test_a_lost_channel_ends_its_calls_and_the_next_reconnects(monkeypatch: pytest.MonkeyPatch) -> None:
    async with run_cluster() as (cluster, calls):
        await calls.call(methods.SETTINGS, methods.NoArguments())
        monkeypatch.setattr(cluster.router, "live", lambda: asyncio.sleep(60))
        waiting = asyncio.create_task(calls.call(methods.LIVE, methods.NoArguments()))
        channel = await calls.get_channel()
        await wait_until(lambda: channel.in_flight)
        await cluster.restart()
        with pytest.raises(ChannelLostError):
            await waiting
        assert (await calls.call(methods.SETTINGS, methods.NoArguments())).policy == "random"
        assert (cluster.look_ups, cluster.addresses) == (1, 2)


async def test_a_cancelled_call_ends_in_the_actor(monkeypatch: pytest.MonkeyPatch) -> None:
    async with run_cluster() as (cluster, calls):
        ended = asyncio.Event()

        async def live() -> None:
            try:
                await asyncio.sleep(60)
            finally:
                ended.set()

        monkeypatch.setattr(cluster.router, "live", live)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await calls.call(methods.LIVE, methods.NoArguments())
        async with asyncio.timeout(5):
            await ended.wait()


async def test_clients_of_a_redeployed_router_restore_their_leases() -> None:
    async with running_client() as (cluster, _, client):
        for name in "ab":
            await client.place(request(name), None)
        before = cluster.router._state
        newer = RouterCalls(cluster.find, RouterSettings(model_id="m", policy="random"))
        await newer.configure(None)
        newer.close()
        assert cluster.router._state is not before
        client.release("a")
        await wait_until(lambda: cluster.router._state.placer.running.keys() == {"b"})
        assert (await client.place(request("c"), None)).policy == "random"


async def test_a_client_configures_each_process_of_the_router_once(monkeypatch: pytest.MonkeyPatch) -> None:
    deployed = RouterSettings(model_id="m", policy="locality-band", ingress_timeout_s=9.0)
    configured: list[LiveSettings | None] = []
    configure = DecodeRouter.configure

    async def record(router: DecodeRouter, settings: RouterSettings, live: LiveSettings | None) -> None:
        configured.append(live)
        await configure(router, settings, live)

    monkeypatch.setattr(DecodeRouter, "configure", record)
    async with running_client(deployed) as (cluster, calls, client):
        lease = await client.place(request("a"), None)
        put = await client.operator.set_policy("round-robin", {})
        await wait_until(lambda: client.settings == put)
        channel = await calls.get_channel()
        channel.close("cut")
        await wait_until(lambda: client._subscription._channel not in (None, channel))
        await client.place(request("b"), None)
        assert configured == [None]
        await cluster.restart()  # with the settings of the first deployment
        await wait_until(lambda: cluster.router._state.placer.running.keys() == {"a", "b"})
        assert configured == [None, put]
        assert cluster.router._ingress_calls._grace_s == 9.0
        assert client.settings == put
        assert lease.worker == cluster.router._state.placer.running["a"].worker


def _task_error(error: Exception) -> RayTaskError:
    """Return Ray's error of an actor's method or constructor that has raised this one."""
    text = f"Traceback (most recent call last):\n  File x\n{type(error).__name__}: {error}"
    return RayTaskError("f", text, error, proctitle="ray", pid=1, ip="::1")


@pytest.mark.parametrize("in_constructor", [False, True])
async def test_refused_settings_are_told_in_one_sentence(in_constructor: bool) -> None:
    refused = _task_error(SwapRefusedError("the table is for model 'x'"))
    async with run_cluster(RouterSettings(model_id="m", policy="random")) as (cluster, calls):
        if in_constructor:
            cluster.error = ActorDiedError(refused)
        else:
            cluster.configure.remote = AsyncMock(side_effect=refused.as_instanceof_cause())
        with pytest.raises(SwapRefusedError) as refused:
            await calls.configure(None)
    assert str(refused.value).startswith("the router refuses the deployed settings: ")
    assert str(refused.value).endswith("the table is for model 'x'")
    assert "\n" not in str(refused.value)
    assert not isinstance(refused.value, RayError)


async def test_an_actor_that_dies_later_refuses_nothing() -> None:
    async with run_cluster(RouterSettings(model_id="m", policy="random")) as (cluster, calls):
        cluster.error = ActorDiedError()
        with pytest.raises(ActorDiedError):
            await calls.configure(None)


async def test_a_slow_lookup_does_not_block_the_loop_and_is_shared() -> None:
    async with run_cluster() as (cluster, _):
        loop_runs, free = threading.Event(), []

        def find() -> Any:
            free.append(loop_runs.wait(5))
            return cluster.find()

        calls = RouterCalls(find)
        for _ in range(2):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.02):
                    await calls.call(methods.SETTINGS, methods.NoArguments())
        loop_runs.set()
        await calls.call(methods.SETTINGS, methods.NoArguments())
        assert free == [True]
        calls.close()


async def test_a_failure_that_no_caller_awaited_does_not_fail_a_later_call() -> None:
    async with run_cluster() as (cluster, _):
        free = threading.Event()

        def find() -> Any:
            if not free.is_set():
                free.wait(5)
                raise ConnectionError("GCS is away")
            return cluster.find()

        calls = RouterCalls(find)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.02):
                await calls.call(methods.SETTINGS, methods.NoArguments())
        free.set()
        await asyncio.sleep(0.2)
        await calls.call(methods.SETTINGS, methods.NoArguments())
        calls.close()


async def test_close_closes_a_channel_that_has_just_been_opened() -> None:
    async with run_cluster() as (_, calls):
        caller = asyncio.create_task(calls.get_channel())
        await asyncio.sleep(0)
        connecting = calls._connecting
        assert connecting is not None
        connecting.add_done_callback(lambda task: calls.close())  # this runs before the caller goes on
        assert not (await caller).is_open


async def test_no_call_starts_ray_after_its_shutdown() -> None:
    handle = Mock(spec=ActorHandle)
    with pytest.raises(ConnectionError, match="Ray is shut down"):
        await RouterCalls(lambda: handle).call(methods.SETTINGS, methods.NoArguments())
    assert not ray.is_initialized()


@pytest.mark.parametrize(
    ("error", "look_ups"), [(ActorUnavailableError("test", None), 1), (ActorDiedError(), 2)]
)
async def test_the_actor_is_looked_up_again_only_after_it_died(error: Exception, look_ups: int) -> None:
    async with run_cluster() as (cluster, calls):
        await calls.call(methods.SETTINGS, methods.NoArguments())
        cluster.error = error
        await cluster.restart()
        with pytest.raises((type(error), ChannelLostError)):
            await calls.call(methods.SETTINGS, methods.NoArguments())
        with pytest.raises(type(error)):
            await calls.call(methods.SETTINGS, methods.NoArguments())
        cluster.error = None
        await calls.call(methods.SETTINGS, methods.NoArguments())
        assert cluster.look_ups == look_ups
