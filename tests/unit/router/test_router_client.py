"""The ingress's side of the router, over a fake actor that can be slow, away, or new."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest
from fake_router import SLOTS, FakeActor, connected, wait_until, wait_until_idle
from tables import counts_for, request, unit_table

from eldr_serve.errors import Overloaded, SwapRefused
from eldr_serve.router.client import RouterClient
from eldr_serve.router.messages import Answered
from eldr_serve.scheduling import Lease, State


async def test_a_signature_is_scored_here_and_placed_there() -> None:
    actor = FakeActor()
    async with connected(actor, "r0", "r1") as client:
        for name in "ab":  # the first brings the table
            lease = await client.place(request(name), counts_for(1))
            assert (lease.replica, lease.reason, lease.best) == ("r1", "locality-band", True)
        assert actor.requests[-1].similarity.shape == (2,)
        # A swap between scoring and placing: it is scored again.
        actor.state.swap_table(unit_table(2, band=0.0).to_bytes())
        lease = await client.place(request("c"), counts_for(1))
        assert (lease.replica, lease.reason) == ("r1", "locality-band")
        assert not actor.state.counters["signature_missing"]
        lease = await client.place(request("d"), counts_for(1, num_layers=5))
        assert lease.reason == "no-signature"
        assert actor.state.counters["signature_missing"] == 1


async def test_counts_travel_where_the_policy_reads_them_and_come_back_after_a_restart() -> None:
    actor = FakeActor(policy="marginal-cost", table=None)
    held = lambda: actor.state.placer.policy.active.held  # noqa: E731
    async with connected(actor, "r0", "r1", timeout_s=0.1) as client:
        await client.place(request("a"), counts_for(0))
        assert actor.requests[-1].expert_counts.dtype == "uint8"
        actor.alive = False
        away = await client.place(request("b"), counts_for(1))
        assert away.reason == "router-away"
        actor.restart()
        await wait_until(lambda: not client.router_away and len(actor.running) == 2)
        assert set(held()) == {"a", "b"}
        client.release("a")
        client.release("b")
        await wait_until(lambda: not held())
        assert not client.leases
        await client.call("set_policy", "shortest-queue", {})
        await client.place(request("c"), counts_for(0))
        assert actor.requests[-1].expert_counts is None


async def test_concurrent_placements_share_a_decision_and_all_releases_arrive(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    actor, batches = FakeActor(), []
    actor.delay_s = 0.02
    place = actor.state.place
    monkeypatch.setattr(actor.state, "place", lambda asked: (batches.append(len(asked)), place(asked)))
    async with connected(actor, "r0", "r1", timeout_s=5.0) as client:
        await asyncio.gather(*(client.place(request(str(n)), counts_for(n % 2)) for n in range(100)))
        assert [number for number in batches if number] == [100]
        assert actor.state.status()["leases"] == 100
        for n in range(100):
            client.progress(str(n), n)
            client.release(str(n))
            client.release(str(n))
        await wait_until_idle(client, actor)


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
        assert {lease.reason for lease in leases} == {"router-away"}
        assert sorted(lease.replica for lease in leases).count(kept.replica) in (1, 2)  # by own load
        client.release("away0")
        actor.delay_s = 0.0
        actor.restart()
        await wait_until(lambda: not client.router_away)
        await client.place(request("after"), counts_for(1))
        assert set(actor.running) == {"before", "news", "away1", "away2", "away3", "after"}
        assert actor.state.settings == policy
        await wait_until(lambda: actor.state.counters["placed_by_own_load"] == 4)


async def test_while_the_actor_is_away_nothing_piles_up_for_it() -> None:
    actor = FakeActor()
    async with connected(actor, "r0", "r1", timeout_s=0.05) as client:
        for name in "abc":
            await client.place(request(name), counts_for(0))
        actor.alive = False
        for number in range(50):
            await client.place(request(f"{number}"), counts_for(0))
            client.progress(f"{number}", 3)
            client.release(f"{number}")
        client.release("a")
        await wait_until(lambda: client.router_away and not client._progress)
        assert not client._calls
        actor.alive = True  # the same one, which has kept what it knew
        await wait_until(lambda: set(actor.running) == {"b", "c"})
        for name in "bc":
            client.release(name)
        await wait_until_idle(client, actor)


async def test_of_streams_that_end_while_the_actor_is_away_the_newest_are_kept() -> None:
    actor = FakeActor()
    async with connected(actor, "r0", timeout_s=0.05) as client:
        await client.place(request("a"), counts_for(0))
        actor.alive = False
        for number in range(3000):
            client.answered_client(Answered(float(number), None))
        await wait_until(lambda: client.router_away)
        assert [answered.ttft_s for answered in client._finished] == [float(n) for n in range(1976, 3000)]
        actor.alive = True
        await wait_until(lambda: actor.state.view._answers)
        assert len(actor.state.view._answers) == 1024
        assert not client._finished
        client.release("a")
        await wait_until_idle(client, actor)


async def test_an_actor_that_has_started_again_hears_the_shape_from_its_clients() -> None:
    """Who calls it directly, as a refit does, is refused like everybody."""
    actor = FakeActor()
    async with connected(actor, "r0", "r1") as client:
        await client.call("expect_counts", 2, 8)
        actor.restart()
        await client.place(request("a"), counts_for(0))
        with pytest.raises(SwapRefused, match="report 2 x 8"):
            actor.state.swap_table(unit_table(2, num_experts=16).to_bytes())
        client.release("a")
        await wait_until_idle(client, actor)


async def test_an_actor_that_has_started_again_takes_no_table_of_another_shape() -> None:
    actor = FakeActor()
    async with connected(actor, "r0", "r1") as client:
        await client.call("expect_counts", 2, 8)
        actor.restart()
        await wait_until(lambda: actor.sessions.by_peer)
        with pytest.raises(SwapRefused, match="report 2 x 8"):
            await client.call("swap_table", unit_table(2, num_experts=16).to_bytes())
        assert (await client.call("swap_table", unit_table(2).to_bytes())).table_version > 1


async def test_processes_without_a_router_do_not_all_choose_the_same_worker() -> None:
    chosen = set()
    actor = FakeActor()
    actor.alive = False
    for _ in range(40):
        async with connected(actor, "r0", "r1", timeout_s=0.05) as client:
            chosen.add((await client.place(request("a"), None)).replica)
    assert chosen == {"r0", "r1"}


async def test_with_no_decode_replica_at_all_the_client_is_told_to_come_again() -> None:
    async with connected(FakeActor()) as client:
        with pytest.raises(Overloaded):
            await client.place(request("a"), None)


# -- requests that wait in the actor's decode queue ----------------------------------------------------


def queueing(**options: Any) -> FakeActor:
    """Of a policy under which each worker takes one request at a time."""
    return FakeActor(policy=SLOTS, **options)


async def waiting(
    client: RouterClient, actor: FakeActor, name: str, counts: Any = None, wait_s: float = 30.0
) -> asyncio.Task[Lease]:
    """The placement of a request that is in the queue."""
    size = actor.state.queue_size
    task = asyncio.create_task(client.place(request(name), counts, wait_s=wait_s))
    await wait_until(lambda: actor.state.queue_size == size + 1 and client.leases[name].state is State.QUEUED)
    return task


async def test_a_queued_request_gets_its_lease_when_there_is_room() -> None:
    actor = queueing()
    async with connected(actor, "r0") as client:
        await client.place(request("a"), None, wait_s=30.0)
        task = await waiting(client, actor, "b")
        # Who does not say how long does not wait.
        assert (await client.place(request("c"), None)).reason == "at-once"
        client.release("c")
        for tokens in range(1, 18):
            client.progress("a", tokens)
        client.release("a")
        lease = await task
        assert (lease.request_id, lease.replica, lease.reason) == ("b", "r0", "slot")
        assert lease.waited_s > 0
        client.release("b")
        await wait_until_idle(client, actor)
        assert actor.state.placer.policy.lengths == [0, 17, 0]  # all progress is told before the release


async def test_who_waits_too_long_is_told_to_come_again() -> None:
    actor = queueing()
    async with connected(actor, "r0") as client:
        await client.place(request("a"), None)
        task = await waiting(client, actor, "b", wait_s=0.1)
        with pytest.raises(Overloaded) as refusal:
            await task
        assert (refusal.value.status, refusal.value.retry_after_s) == (503, 1)
        client.release("a")
        await wait_until_idle(client, actor)
        await wait_until(lambda: actor.state.counters["queue_expired"] == 1)


async def test_queued_requests_are_asked_for_again_when_the_actor_starts_anew() -> None:
    actor = queueing()
    async with connected(actor, "r0") as client:
        await client.place(request("a"), None)
        task = await waiting(client, actor, "b", wait_s=2.0)
        started = asyncio.get_running_loop().time()
        actor.restart()
        await wait_until(lambda: actor.state.queue_size == 1)
        assert not task.done()
        with pytest.raises(Overloaded):
            await task
        assert asyncio.get_running_loop().time() - started < 2.5  # the wait did not begin anew


async def test_a_router_that_falls_silent_while_a_request_waits_in_its_queue_is_asked_again() -> None:
    """The channel's pings tell; here it is closed. Its leases are restored, the request loses no time."""
    actor = queueing()
    async with connected(actor, "r0", "r1") as client:
        for name in "ab":
            await client.place(request(name), None, wait_s=30.0)
        task = await waiting(client, actor, "c")
        actor.disconnect()
        await wait_until(
            lambda: client.leases["c"].state is State.QUEUED and actor.sessions.open.keys() == {*"abc"}
        )
        assert not client.router_away
        client.release("a")
        assert (await asyncio.wait_for(task, 10)).reason == "slot"
        client.release("b")
        client.release("c")
        await wait_until_idle(client, actor)


async def test_requests_that_wait_are_scored_again_after_a_swap() -> None:
    actor = queueing()
    async with connected(actor, "r0") as client:
        await client.place(request("a"), None, wait_s=30.0)
        task = await waiting(client, actor, "b", counts_for(0))
        version = actor.state.swap_table(unit_table(3).to_bytes()).table_version
        await wait_until(lambda: actor.state.placer.queue["b"].request.table_version == version)
        assert actor.state.placer.queue["b"].request.similarity.shape == (3,)
        assert actor.state.counters["queued"] == 1
        client.release("a")
        assert (await task).best
        client.release("b")
        await wait_until_idle(client, actor)


async def test_a_call_that_the_router_cannot_answer_is_placed_by_own_load(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    actor = FakeActor()
    async with connected(actor, "r0", timeout_s=5.0) as client:
        await client.place(request("a"), None)
        monkeypatch.setattr(actor.state, "place", lambda asked: 1 / 0)
        lease = await client.place(request("b"), None)
        assert (lease.replica, lease.reason) == ("r0", "no-worker")
        assert "cannot place 1 requests" in caplog.text
        monkeypatch.undo()
        await wait_until(lambda: actor.running.keys() == {"a", "b"})
        for name in "ab":
            client.release(name)
        await wait_until_idle(client, actor)


async def test_a_client_whose_workers_the_router_does_not_know_places_by_own_load_and_says_so() -> None:
    actor = FakeActor()
    async with connected(actor, "r0") as client:
        await client.place(request("a"), None)
        actor.state.update_workers([])  # of another client
        assert (await client.place(request("b"), None)).reason == "no-worker"
        await wait_until(lambda: actor.running.keys() == {"a", "b"})
        assert actor.state.counters["placed_by_client"] == 1
        for name in "ab":
            client.release(name)
        await wait_until_idle(client, actor)


@pytest.mark.parametrize("seed", range(4))
async def test_whatever_happens_every_request_ends_once_and_nothing_stays_behind(seed: int) -> None:
    """Granted, expired or cancelled, while the actor is slow, swaps, changes its policy and dies."""
    rng = random.Random(seed)
    actor = queueing(parameters={"slots": 2})
    actor.delay_s = 0.002
    ends: dict[str, str] = {}

    async with connected(actor, "r0", "r1", "r2", timeout_s=0.2) as client:

        async def one(name: str) -> None:
            counts = counts_for(rng.randrange(2))
            try:
                lease = await client.place(request(name), counts, wait_s=rng.choice([0.005, 1.0]))
                assert client.leases[name] is lease
                await asyncio.sleep(rng.expovariate(40))
                ends[name] = "granted"
            except Overloaded:
                ends[name] = "expired"
            except asyncio.CancelledError:
                ends[name] = "cancelled"
            finally:
                client.release(name)

        async def disturb() -> None:
            for _ in range(6):
                await asyncio.sleep(0.08)
                match rng.choice(["swap", "policy", "restart", "die", "disconnect"]):
                    case "swap":
                        actor.state.swap_table(unit_table(rng.randrange(1, 4)).to_bytes())
                    case "policy":
                        actor.state.set_policy(SLOTS, {"slots": rng.randrange(1, 4)})
                    case "disconnect":
                        actor.disconnect()
                    case "restart":
                        actor.restart()
                    case "die":
                        actor.alive = False
                        await asyncio.sleep(0.05)
                        actor.restart()

        tasks = []
        disturbing = asyncio.create_task(disturb())
        for number in range(250):
            await asyncio.sleep(rng.expovariate(500))
            tasks.append(asyncio.create_task(one(str(number))))
            if rng.random() < 0.15:
                asyncio.get_running_loop().call_later(rng.random() * 0.1, tasks[-1].cancel)
        await asyncio.gather(disturbing, *tasks, return_exceptions=True)
        assert {*ends.values()} >= {"granted", "expired"}
        assert len(ends) + sum(task.cancelled() for task in tasks) >= 250
        await wait_until_idle(client, actor)
