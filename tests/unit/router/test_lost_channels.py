"""Leases of a client follow its channel to the router."""

from __future__ import annotations

import asyncio
from typing import Any

from fake_router import FakeActor, connected, wait_until, wait_until_idle
from tables import counts_for, request

from eldr_serve.router.directory import ReplicaDirectory
from eldr_serve.router.messages import Place, Restore, encode


async def test_leases_of_a_client_go_with_its_channel_unless_it_comes_again() -> None:
    actor = FakeActor(grace_s=0.2)
    async with connected(actor, "r0") as again, connected(actor, "r0") as alive:
        async with connected(actor, "r0") as dead:
            for name, client in {"dead": dead, "again": again, "alive": alive}.items():
                await client.place(request(name), None)
            assert actor.running.keys() == {"dead", "again", "alive"}
        again._link._channel.close("cut")
        await wait_until(lambda: actor.running.keys() == {"again", "alive"})
        assert actor.state.clients == actor.sessions.by_client.keys() == {again.name, alive.name}
        assert actor.state.counters["leases_of_lost_clients"] == 1
        assert not actor.state.counters["leases_restored"]
        again.release("again")
        await wait_until(lambda: actor.running.keys() == {"alive"})
    await wait_until(lambda: not actor.running)
    assert not actor.sessions.by_client
    assert not actor.sessions.by_peer


async def test_what_comes_late_by_a_connection_that_its_client_has_left_changes_nothing() -> None:
    """Nobody would hear of the lease, nor release it."""
    actor = FakeActor()
    left, now = await actor.calls().connected(), await actor.calls().connected()
    nothing: Any = lambda told: None  # noqa: E731
    for channel in (left, now):
        channel.open_call("subscribe", encode(Restore("c", ("r0",))), nothing, nothing)
        await wait_until(lambda: len(actor.sessions.by_peer) == 1)
        place = channel.open_call("place", encode(Place(request("a"))), nothing, nothing)
        await wait_until(lambda: actor.running.keys() == {"a"})
    await wait_until(left.closed.done)
    assert len(actor.server.connections) == len(actor.sessions.by_client) == 1
    place.close(3)
    await wait_until(lambda: not actor.running)
    now.close("that was all")


async def test_who_has_not_subscribed_gets_no_lease() -> None:
    actor, errors = FakeActor(), []
    channel = await actor.calls().connected()
    channel.open_call("place", encode(Place(request("a"))), lambda told: None, errors.append)
    await wait_until(lambda: errors)
    assert not actor.running
    channel.close("that was all")


async def test_a_release_while_the_channel_is_away_is_told_by_the_next() -> None:
    actor = FakeActor()
    async with connected(actor, "r0", "r1") as client:
        for name in "abc":
            await client.place(request(name), counts_for(0))
        client.progress("b", 5)
        actor.disconnect()
        client.release("a")
        await wait_until(lambda: actor.running.keys() == {"b", "c"})
        assert actor.running["b"].generated_tokens == 5
        assert not client.router_away
        client.release("b")
        client.release("c")
        await wait_until_idle(client, actor)


async def test_a_change_of_replicas_is_told_before_the_next_request_and_without_one() -> None:
    actor, directory = FakeActor(), ReplicaDirectory()
    async with connected(actor, "r0", directory=directory) as client:
        await client.place(request("a"), None)
        directory.publish({"r1": {}})
        assert (await client.place(request("b"), None)).replica == "r1"
        directory.publish({"r2": {}})
        await wait_until(lambda: actor.state.positions == ["r2"])
        for name in "ab":
            client.release(name)
        await asyncio.sleep(0)
