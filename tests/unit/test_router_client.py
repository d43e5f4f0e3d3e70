"""The ingress's side of the router, over a fake actor that can be slow, away, or new."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from ray.exceptions import RayActorError
from tables import counts_for, unit_table

from eldr_serve.serving.errors import Overloaded
from eldr_serve.serving.messages import Exchange, PlacementRequest
from eldr_serve.serving.replicas import ReplicaDirectory
from eldr_serve.serving.router_client import RouterClient
from eldr_serve.serving.router_state import RouterState


class FakeActor:
    """An actor handle over a RouterState."""

    def __init__(self, **options: Any) -> None:
        self.options = {
            "model_id": "m",
            "policy": "locality-band",
            "table": unit_table(2).to_bytes(),
        } | options
        self.state = RouterState(**self.options)
        self.alive = True
        self.delay_s = 0.0
        self.exchanges: list[Exchange] = []

    def restart(self) -> None:
        self.state = RouterState(**self.options)
        self.alive = True

    def __getattr__(self, method: str) -> Any:
        class Method:
            @staticmethod
            async def remote(*args: Any) -> Any:
                await asyncio.sleep(self.delay_s)
                if not self.alive:
                    raise RayActorError
                if method == "exchange":
                    self.exchanges.append(args[0])
                if method == "settings":
                    return self.state.settings
                return getattr(self.state, method)(*args)

        return Method


@asynccontextmanager
async def connected(actor: FakeActor, *replicas: str, timeout_s: float = 0.3) -> AsyncIterator[RouterClient]:
    directory = ReplicaDirectory()
    directory.publish(replicas)
    client = RouterClient(lambda: actor, directory, timeout_s=timeout_s)  # type: ignore[arg-type, return-value]
    client.start()
    try:
        yield client
    finally:
        await client.stop()


def request(name: str, **fields: Any) -> PlacementRequest:
    return PlacementRequest(name, 10, 20, **fields)


async def settled(condition: Any, timeout_s: float = 5.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.01)


async def test_a_signature_is_scored_here_and_placed_there() -> None:
    actor = FakeActor()
    async with connected(actor, "r0", "r1") as client:
        await client.place(request("first"), None)  # brings the table
        lease = await client.place(request("a"), counts_for(1))
        assert (lease.replica, lease.best) == ("r1", True)
        sent = actor.exchanges[-1].placements[0]
        assert sent.similarity is not None
        assert sent.similarity.shape == (2,)


async def test_the_very_first_placement_is_scored_too() -> None:
    async with connected(FakeActor(), "r0", "r1") as client:
        lease = await client.place(request("a"), counts_for(1))
        assert (lease.replica, lease.reason) == ("r1", "locality-band")


async def test_counts_travel_where_the_policy_reads_them_and_come_back_after_a_restart() -> None:
    actor = FakeActor(policy="marginal-cost", table=None)
    async with connected(actor, "r0", "r1", timeout_s=0.1) as client:
        await client.place(request("a"), counts_for(0))
        sent = actor.exchanges[-1].placements[0].counts
        assert sent is not None
        assert sent.dtype == "uint8"
        actor.alive = False
        away = await client.place(request("b"), counts_for(1))
        assert away.reason == "router-away"
        actor.restart()
        await settled(lambda: not client.router_away and len(actor.state._leases) == 2)
        assert set(actor.state._policy._held) == {"a", "b"}  # type: ignore[attr-defined]
        client.release("a")
        client.release("b")
        await settled(lambda: not actor.state._policy._held)  # type: ignore[attr-defined]
        assert not client._counts
        await client.call("set_policy", "shortest-queue", {})
        await client.place(request("c"), counts_for(0))
        assert actor.exchanges[-1].placements[0].counts is None


async def test_concurrent_placements_share_calls() -> None:
    actor = FakeActor()
    actor.delay_s = 0.02
    async with connected(actor, "r0", "r1") as client:
        await asyncio.gather(*(client.place(request(str(n)), counts_for(n % 2)) for n in range(100)))
        assert len(actor.exchanges) < 10
        assert actor.state.status()["leases"] == 100


async def test_releases_reach_the_actor_and_load_returns_to_zero() -> None:
    actor = FakeActor()
    async with connected(actor, "r0", "r1") as client:
        for n in range(5):
            await client.place(request(str(n)), None)
            client.progress(str(n), n)
        for n in range(5):
            client.release(str(n))
            client.release(str(n))
        await settled(lambda: actor.state.status()["leases"] == 0)
        assert client.leases == 0
        assert all(w["in_flight"] == w["kv_tokens"] == 0 for w in actor.state.status()["workers"])


async def test_a_placement_that_is_cancelled_leaves_no_lease() -> None:
    actor = FakeActor()
    async with connected(actor, "r0") as client:
        await client.place(request("first"), None)
        actor.delay_s = 0.05
        task = asyncio.create_task(client.place(request("a"), None))
        await asyncio.sleep(0.02)
        task.cancel()
        actor.delay_s = 0.0
        await settled(lambda: set(actor.state._leases) == {"first"} and "a" in str(actor.exchanges))


async def test_a_swap_between_scoring_and_placing_is_scored_again() -> None:
    actor = FakeActor()
    async with connected(actor, "r0", "r1") as client:
        await client.place(request("first"), None)
        actor.state.swap_table(unit_table(2, band=0.0).to_bytes())
        lease = await client.place(request("a"), counts_for(1))
        assert (lease.replica, lease.reason) == ("r1", "locality-band")


async def test_a_signature_of_another_shape_is_placed_by_load_and_counted() -> None:
    actor = FakeActor()
    async with connected(actor, "r0", "r1") as client:
        await client.place(request("first"), None)
        lease = await client.place(request("a"), counts_for(1, num_layers=5))
        assert lease.reason == "no-signature"
        assert actor.state.counters["signature_missing"] == 2


@pytest.mark.parametrize("how", ["dead", "slow"])
async def test_while_the_actor_is_away_own_load_places_and_afterwards_it_knows_all(how: str) -> None:
    actor = FakeActor()
    async with connected(actor, "r0", "r1", timeout_s=0.1) as client:
        kept = await client.place(request("before"), counts_for(1))
        actor.state.set_policy("locality-band", {"band": 0.0})
        await client.place(request("news"), None)
        policy = actor.state.settings
        if how == "dead":
            actor.alive = False
        else:
            actor.delay_s = 10.0
        leases = [await client.place(request(f"away{n}"), counts_for(1)) for n in range(4)]
        assert client.router_away
        assert {lease.reason for lease in leases} <= {"router-away"}
        assert sorted(lease.replica for lease in leases).count(kept.replica) in (1, 2)  # by own load
        client.release("away0")
        actor.delay_s = 0.0
        actor.restart()
        await settled(lambda: not client.router_away)
        await client.place(request("after"), counts_for(1))
        assert set(actor.state._leases) == {"before", "news", "away1", "away2", "away3", "after"}
        assert actor.state.settings == policy
        assert actor.state.counters["placed_by_own_load"] == 4


async def test_with_no_decode_replica_at_all_the_client_is_told_to_come_again() -> None:
    async with connected(FakeActor()) as client:
        with pytest.raises(Overloaded):
            await client.place(request("a"), None)


async def test_a_lease_served_elsewhere_is_corrected() -> None:
    actor = FakeActor()
    async with connected(actor, "r0", "r1") as client:
        await client.place(request("first"), None)
        lease = await client.place(request("a"), counts_for(1))
        assert lease.replica == "r1"
        client.served_by("a", "r0")
        await settled(lambda: actor.state._leases["a"][1].replica == "r0")
