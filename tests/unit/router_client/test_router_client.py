"""The router's client in the ingress, with a fake actor that can be slow, unreachable or restarted."""

import asyncio
import random
from typing import Any

import pytest

from eldr_serve.errors import OverloadedError, SwapRefusedError
from eldr_serve.router.status import router_status
from eldr_serve.router_client.client import RouterClient
from eldr_serve.router_protocol.messages import StreamLatencies
from eldr_serve.scheduling.types import Lease, LeaseState
from tests.support.fake_router import (
    SLOTS,
    FakeActor,
    connected_client,
    router_and_client,
    wait_until,
    wait_until_idle,
)
from tests.support.tables import counts_for, request, unit_table


async def test_a_client_scores_counts_and_the_router_places_it() -> None:
    async with router_and_client("r0", "r1") as (actor, client):
        for name in "ab":  # the first one receives the table
            lease = await client.place(request(name), counts_for(1))
            assert (lease.worker, lease.reason, lease.is_most_similar) == ("r1", "locality-band", True)
        assert actor.requests[-1].similarity.shape == (2,)
        # A swap between scoring and placing: it is scored again.
        actor.state.live_settings.swap_table(unit_table(2, band=0.0).to_bytes())
        lease = await client.place(request("c"), counts_for(1))
        assert (lease.worker, lease.reason) == ("r1", "locality-band")
        assert not actor.state.counters["counts_missing"]
        lease = await client.place(request("d"), counts_for(1, num_layers=5))
        assert lease.reason == "no-counts"
        assert actor.state.counters["counts_missing"] == 1


async def test_expert_counts_are_sent_if_the_policy_reads_them_and_later_restored() -> None:
    actor = FakeActor(policy="marginal-cost", table=None)
    running = lambda: actor.state.placer.policy.activation.running  # noqa: E731
    async with connected_client(actor, "r0", "r1", timeout_s=0.1) as client:
        await client.place(request("a"), counts_for(0))
        assert actor.requests[-1].expert_counts.dtype == "uint8"
        actor.alive = False
        away = await client.place(request("b"), counts_for(1))
        assert away.reason == "router-unreachable"
        actor.restart()
        await wait_until(lambda: not client.router_unreachable and len(actor.running) == 2)
        assert set(running()) == {"a", "b"}
        client.release("a")
        client.release("b")
        await wait_until(lambda: not running())
        assert not client.leases
        await client.operator.set_policy("shortest-queue", {})
        await client.place(request("c"), counts_for(0))
        assert actor.requests[-1].expert_counts is None


async def test_concurrent_requests_are_placed_together(monkeypatch: pytest.MonkeyPatch) -> None:
    actor, batches = FakeActor(), []
    actor.delay_s = 0.02
    place = actor.state.leases.place
    monkeypatch.setattr(
        actor.state.leases, "place", lambda leases: (batches.append(len(leases)), place(leases))
    )
    async with connected_client(actor, "r0", "r1", timeout_s=5.0) as client:
        await asyncio.gather(*(client.place(request(str(n)), counts_for(n % 2)) for n in range(100)))
        assert [number for number in batches if number] == [100]
        assert router_status(actor.state)["leases"] == 100
        for n in range(100):
            client.set_generated_tokens(str(n), n)
            client.release(str(n))
            client.release(str(n))


@pytest.mark.parametrize("how", ["dead", "slow"])
async def test_local_fallback_decides_without_the_actor_which_later_restores_all_leases(how: str) -> None:
    async with router_and_client("r0", "r1", timeout_s=0.1) as (actor, client):
        lease_before = await client.place(request("before"), counts_for(1))
        actor.state.live_settings.set_policy("locality-band", {"band": 0.0})
        await client.place(request("update"), None)
        policy = actor.state.settings
        if how == "dead":
            actor.alive = False
        else:
            actor.delay_s = 10.0
        leases = [await client.place(request(f"away{n}"), counts_for(1)) for n in range(4)]
        assert client.router_unreachable
        assert {lease.reason for lease in leases} == {"router-unreachable"}
        workers = [lease.worker for lease in leases]
        assert workers.count(lease_before.worker) in (1, 2)  # local fallback has chosen the workers
        client.release("away0")
        actor.delay_s = 0.0
        actor.restart()
        await wait_until(lambda: not client.router_unreachable)
        await client.place(request("after"), counts_for(1))
        assert set(actor.running) == {"before", "update", "away1", "away2", "away3", "after"}
        assert actor.state.settings == policy
        await wait_until(lambda: actor.state.counters["placed_by_local_fallback"] == 4)


async def test_a_client_keeps_no_backlog_for_an_unreachable_actor() -> None:
    async with router_and_client("r0", "r1", timeout_s=0.05) as (actor, client):
        for name in "abc":
            await client.place(request(name), counts_for(0))
        actor.alive = False
        for number in range(50):
            await client.place(request(f"{number}"), counts_for(0))
            client.set_generated_tokens(f"{number}", 3)
            client.release(f"{number}")
        client.release("a")
        await wait_until(lambda: client.router_unreachable and not client._unreported)
        assert not client._place_calls
        actor.alive = True  # the actor has kept its state
        await wait_until(lambda: set(actor.running) == {"b", "c"})


async def test_only_the_newest_latencies_are_kept_for_an_unreachable_actor() -> None:
    async with router_and_client("r0", timeout_s=0.05) as (actor, client):
        await client.place(request("a"), counts_for(0))
        actor.alive = False
        for number in range(3000):
            client.record_stream(StreamLatencies(float(number), None))
        await wait_until(lambda: client.router_unreachable)
        assert [answered.ttft_s for answered in client._ended_streams] == [
            float(n) for n in range(1976, 3000)
        ]
        actor.alive = True
        await wait_until(lambda: actor.state.view._answers)
        assert len(actor.state.view._answers) == 1024
        assert not client._ended_streams


async def test_a_restarted_actor_learns_the_shape_and_refuses_tables_of_another() -> None:
    """The actor learns the shape from its clients. It also refuses direct calls, such as those of a refit."""
    actor, other = FakeActor(), unit_table(2, num_experts=16).to_bytes()
    async with connected_client(actor, "r0", "r1") as client:
        await client.expect_counts(2, 8)
        actor.restart()
        await wait_until(lambda: actor.ingress_calls.has_ingresses)
        with pytest.raises(SwapRefusedError, match="report 2 x 8"):
            actor.state.live_settings.swap_table(other)
        with pytest.raises(SwapRefusedError, match="report 2 x 8"):
            await client.operator.swap_table(other)
        assert (await client.operator.swap_table(unit_table(2).to_bytes())).table_version > 1


async def test_clients_without_a_router_choose_different_workers() -> None:
    chosen = set()
    actor = FakeActor()
    actor.alive = False
    for _ in range(40):
        async with connected_client(actor, "r0", "r1", timeout_s=0.05) as client:
            chosen.add((await client.place(request("a"), None)).worker)
    assert chosen == {"r0", "r1"}


async def test_a_request_is_refused_without_a_decode_replica() -> None:
    async with connected_client(FakeActor()) as client:
        with pytest.raises(OverloadedError):
            await client.place(request("a"), None)


async def start_waiting(
    client: RouterClient, actor: FakeActor, name: str, counts: Any = None, wait_s: float = 30.0
) -> asyncio.Task[Lease]:
    """Wait until a request is in the queue, and return the task of its placement."""
    size = actor.state.leases.queue_size
    task = asyncio.create_task(client.place(request(name), counts, wait_s=wait_s))
    await wait_until(
        lambda: actor.state.leases.queue_size == size + 1 and client.leases[name].state is LeaseState.QUEUED
    )
    return task


async def test_a_queued_request_gets_its_lease_when_a_slot_is_free() -> None:
    async with router_and_client("r0", policy=SLOTS) as (actor, client):
        await client.place(request("a"), None, wait_s=30.0)
        task = await start_waiting(client, actor, "b")
        # A request without a waiting time does not wait.
        assert (await client.place(request("c"), None)).reason == "at-once"
        client.release("c")
        for tokens in range(1, 18):
            client.set_generated_tokens("a", tokens)
        client.release("a")
        lease = await task
        assert (lease.request_id, lease.worker, lease.reason) == ("b", "r0", "slot")
        assert lease.waited_s > 0
        client.release("b")
        await wait_until_idle(client, actor)
        assert actor.state.placer.policy.lengths == [0, 17, 0]  # all progress arrives before the release


async def test_the_policy_knows_which_answers_are_complete() -> None:
    async with router_and_client("r0", "r1", "r2", policy=SLOTS) as (actor, client):
        for name in "abc":
            await client.place(request(name), None)
            client.set_generated_tokens(name, 5)
        client.release("a", is_complete=False)
        client.release("b")
        await client.place(request("c"), None)  # another attempt
        await wait_until(lambda: actor.running.keys() == {"c"})
        assert actor.state.placer.policy.aborted == ["a", "c"]


async def test_a_request_that_waits_too_long_is_refused() -> None:
    async with router_and_client("r0", policy=SLOTS) as (actor, client):
        await client.place(request("a"), None)
        task = await start_waiting(client, actor, "b", wait_s=0.1)
        with pytest.raises(OverloadedError) as refusal:
            await task
        assert (refusal.value.status, refusal.value.retry_after_s) == (503, 1)
        await wait_until(lambda: actor.state.counters["queue_expired"] == 1)


async def test_queued_requests_are_sent_again_to_a_restarted_actor() -> None:
    async with router_and_client("r0", policy=SLOTS) as (actor, client):
        await client.place(request("a"), None)
        task = await start_waiting(client, actor, "b", wait_s=2.0)
        started = asyncio.get_running_loop().time()
        actor.restart()
        await wait_until(lambda: actor.state.leases.queue_size == 1)
        assert not task.done()
        with pytest.raises(OverloadedError):
            await task
        assert asyncio.get_running_loop().time() - started < 2.5  # the wait did not restart


async def test_a_queued_request_is_sent_again_after_a_lost_channel() -> None:
    """The channel closes, as after missing pings. The leases are restored, and the request still waits."""
    async with router_and_client("r0", "r1", policy=SLOTS) as (actor, client):
        for name in "ab":
            await client.place(request(name), None, wait_s=30.0)
        task = await start_waiting(client, actor, "c")
        actor.disconnect()
        await wait_until(
            lambda: (
                client.leases["c"].state is LeaseState.QUEUED
                and actor.ingress_calls.place_calls.keys() == {*"abc"}
            )
        )
        assert not client.router_unreachable
        client.release("a")
        assert (await asyncio.wait_for(task, 10)).reason == "slot"


async def test_queued_requests_are_scored_again_after_a_swap() -> None:
    async with router_and_client("r0", policy=SLOTS) as (actor, client):
        await client.place(request("a"), None, wait_s=30.0)
        task = await start_waiting(client, actor, "b", counts_for(0))
        version = actor.state.live_settings.swap_table(unit_table(3).to_bytes()).table_version
        await wait_until(lambda: actor.state.placer.queue.leases["b"].request.table_version == version)
        assert actor.state.placer.queue.leases["b"].request.similarity.shape == (3,)
        assert actor.state.counters["queued"] == 1
        client.release("a")
        assert (await task).is_most_similar


@pytest.mark.parametrize("fails", [True, False], ids=["fails", "knows no worker"])
async def test_local_fallback_decides_if_the_router_cannot_place(
    fails: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with router_and_client("r0", timeout_s=5.0) as (actor, client):
        await client.place(request("a"), None)
        if fails:
            monkeypatch.setattr(actor.state.leases, "place", lambda leases: 1 / 0)
        else:
            actor.state.ingresses.set_reachable_workers(client.name, [])
        lease = await client.place(request("b"), None)
        assert (lease.worker, lease.reason) == ("r0", "router-error" if fails else "no-worker")
        assert ("cannot place 1 requests" in caplog.text) == fails
        monkeypatch.undo()
        await wait_until(lambda: actor.running.keys() == {"a", "b"})
        assert actor.state.counters["placed_by_ingress"] == 1


async def test_a_lease_is_sent_although_a_later_part_of_its_batch_fails(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with router_and_client("r0", policy=SLOTS, timeout_s=5.0) as (actor, client):
        await client.place(request("a"), None)
        task = await start_waiting(client, actor, "b")
        monkeypatch.setattr(actor.state.leases, "_grant", lambda leases: 1 / 0)
        client.release("a")
        assert ((await task).worker, task.result().reason) == ("r0", "slot")
        assert (await client.place(request("c"), None)).reason == "at-once"
        assert "cannot place 1 requests" in caplog.text
        assert actor.running.keys() == {"b", "c"}
        monkeypatch.undo()


async def test_a_batch_is_placed_although_its_progress_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    async with router_and_client("r0", "r1", timeout_s=5.0) as (actor, client):
        await client.place(request("a"), counts_for(1))
        monkeypatch.setattr(actor.state.leases, "set_generated_tokens", lambda tokens: 1 / 0)
        assert (await client.place(request("b"), counts_for(1))).reason == "locality-band"
        monkeypatch.undo()


@pytest.mark.parametrize("seed", range(4))
async def test_each_request_ends_once_and_leaves_nothing_behind(seed: int) -> None:
    """Requests get leases, expire or are cancelled while the actor is slow, changed, and restarted."""
    rng = random.Random(seed)
    actor = FakeActor(policy=SLOTS, parameters={"slots": 2})
    actor.delay_s = 0.002
    ends: dict[str, str] = {}

    async with connected_client(actor, "r0", "r1", "r2", timeout_s=0.2) as client:

        async def run(name: str) -> None:
            counts = counts_for(rng.randrange(2))
            try:
                lease = await client.place(request(name), counts, wait_s=rng.choice([0.005, 1.0]))
                assert client.leases[name] is lease
                await asyncio.sleep(rng.expovariate(40))
                ends[name] = "granted"
            except OverloadedError:
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
                        actor.state.live_settings.swap_table(unit_table(rng.randrange(1, 4)).to_bytes())
                    case "policy":
                        actor.state.live_settings.set_policy(SLOTS, {"slots": rng.randrange(1, 4)})
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
            tasks.append(asyncio.create_task(run(str(number))))
            if rng.random() < 0.15:
                asyncio.get_running_loop().call_later(rng.random() * 0.1, tasks[-1].cancel)
        await asyncio.gather(disturbing, *tasks, return_exceptions=True)
        assert {*ends.values()} >= {"granted", "expired"}
        assert len(ends) + sum(task.cancelled() for task in tasks) >= 250
