"""Data-parallel ranks of a replica's engine are workers. The replica's faults are those of all of them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eldr_serve.channel import ChannelLostError
from eldr_serve.engine.protocol import EngineRequest
from eldr_serve.engine.report_fields import KV_USAGE, QUEUE, RANKS, REPORT_NUMBER, SLOTS
from eldr_serve.fleet.decode_start import DecodeStartEstimator
from eldr_serve.fleet.directory import ReplicaDirectory
from eldr_serve.fleet.drain import LastReplicaError, drain
from eldr_serve.fleet.fleet import Fleet
from eldr_serve.fleet.outliers import FAILURES, OutlierDetector
from eldr_serve.queues.reports import QueueReport
from eldr_serve.replicas import decode_reporter, servers
from eldr_serve.scheduling.cost import StepAnswer, StepSums
from eldr_serve.scheduling.prefixes import PrefixCacheSize
from eldr_serve.scheduling.worker_names import rank_of, replica_of, worker_names
from tests.support.clock import Clock
from tests.support.engine_server import serving
from tests.support.fake_fleet import FakeFleet, answer_with, refusal
from tests.support.fake_router import place_one, router_state, wait_until
from tests.support.request_path import END, WHOLE, Pipeline, RecordedCounters, good_decode, pack_ids

WORKERS = ("d0/0", "d0/1", "d1/0", "d1/1")


@given(st.text("abc0123456789", min_size=1), st.integers(1, 12))
def test_a_workers_name_has_its_replica_and_rank(replica: str, ranks: int) -> None:
    names = worker_names(replica, ranks)
    assert len(set(names)) == ranks
    assert {replica_of(name) for name in names} == {replica}
    assert [rank_of(name) for name in names] == ([None] if ranks == 1 else list(range(ranks)))
    assert ranks > 1 or names == [replica]


def test_the_directory_has_the_workers_and_their_reports() -> None:
    directory = ReplicaDirectory()
    directory.publish({"a": {RANKS: 2}, "b": {RANKS: 1}, "c": {}})
    assert directory.known_workers == ("a/0", "a/1", "b", "c")

    def report(calls: int, usage: float) -> dict[str, Any]:
        return {KV_USAGE: usage, REPORT_NUMBER: 1, QUEUE: {"calls": calls}}

    directory.update_reports({"a": {RANKS: [report(1, 0.1), report(2, 0.2)]}, "b": report(3, 0.3), "c": {}})
    assert directory.kv_usage.usage_by_worker == {"a/0": 0.1, "a/1": 0.2, "b": 0.3}
    calls = {name: queue.calls for name, queue in directory.reports.items()}
    assert calls == {"a/0": 1, "a/1": 2, "b": 3}
    directory.drop("a")
    assert directory.known_workers == ("b", "c")


@asynccontextmanager
async def engines(*names: str) -> AsyncIterator[tuple[Fleet, dict[str, Any]]]:
    """Run decode replicas with two ranks each, and an ingress's fleet of them."""
    directory, running = ReplicaDirectory(), {}
    fleet = Fleet(directory)
    async with AsyncExitStack() as stack:
        for name in names:
            at_work = serving(servers.DecodeServer, router_name="router", ranks=2)
            running[name], _ = await stack.enter_async_context(at_work)
        fleet.start()
        directory.publish({name: await one.record_replica_metadata() for name, one in running.items()})
        await wait_until(lambda: len(fleet.live_workers) == 2 * len(names))
        yield fleet, running
        await fleet.stop()


def generate(fleet: Fleet, worker: str) -> Any:
    body = json.dumps({"prompt": "x", "max_tokens": 5000, "stream": True}).encode()
    return fleet.call(worker, "generate", EngineRequest("completions", body, worker))


async def test_calls_are_counted_on_their_rank() -> None:
    async with engines("a") as (fleet, running):
        assert fleet.live_workers == ("a/0", "a/1")
        calls = [generate(fleet, worker) for worker in ("a/1", "a/1", "a/0")]
        for call in calls:
            assert await call.read() is not None
        assert [fleet.slot_calls_of(worker) for worker in ("a/0", "a/1", "b/0")] == [1, 2, 0]
        by_rank = running["a"].report()[RANKS]
        assert [QueueReport.parse(report[QUEUE]).calls for report in by_rank] == [1, 2]
        assert (await running["a"].record_autoscaling_stats())["in_flight"] == 3.0  # calls of all ranks
        for call in calls:
            call.cancel()
            await call.wait_until_ended()
        assert [fleet.slot_calls_of(worker) for worker in fleet.live_workers] == [0, 0]
        idle = running["a"].report()[RANKS]
        assert [report[QUEUE]["calls"] for report in idle] == [0, 0]


async def test_a_drain_takes_all_ranks_of_a_replica() -> None:
    async with engines("a", "b") as (fleet, _):
        call = generate(fleet, "a/1")
        assert await call.read() is not None
        assert await drain(fleet, "a") == 1
        await wait_until(lambda: fleet.live_workers == ("b/0", "b/1"))
        assert call.is_leaving
        call.cancel()
        with pytest.raises(LastReplicaError, match="b is the only decode replica that takes calls"):
            await drain(fleet, "b")


async def test_the_ranks_of_a_lost_replica_leave_together() -> None:
    async with engines("a", "b") as (fleet, running):
        running["a"]._channel_server.suspend("its core is dead")
        await wait_until(lambda: fleet.live_workers == ("b/0", "b/1"))
        with pytest.raises(ChannelLostError):
            fleet.call("a/1", "generate", EngineRequest())


def test_failures_of_any_rank_eject_their_replica() -> None:
    fleet: Any = FakeFleet(good_decode, *WORKERS)
    counters, clock = RecordedCounters(), Clock()
    outliers = OutlierDetector(fleet, counters, clock=clock)
    for failure in range(FAILURES):
        assert outliers.usable_workers == list(WORKERS)
        outliers.record_failure(f"d0/{failure % 2}", RuntimeError("no"))
    assert outliers.usable_workers == ["d1/0", "d1/1"]
    assert counters.events == ["ejected"]
    clock.now += 10.0
    for _ in range(FAILURES - 1):
        outliers.record_failure("d0/0", RuntimeError("no"))
    outliers.record_success("d0/1")
    outliers.record_failure("d0/0", RuntimeError("no"))
    assert outliers.usable_workers == list(WORKERS)


@pytest.mark.parametrize("lost", [ChannelLostError("its rank 1 was killed"), refusal(500)])
async def test_an_answer_resumes_on_another_replica_than_that_of_the_failed_rank(lost: Exception) -> None:
    begun = answer_with((WHOLE[:10], 1, pack_ids(0)), lost)
    rest = answer_with((WHOLE[10:] + END, 3, pack_ids(1, 2, 3)))
    pipeline = Pipeline(
        decode=lambda sent: (begun if sent.replica == "d0/0" else rest)(sent), workers=WORKERS
    )
    assert await pipeline.run(stream=True) == WHOLE + END
    assert [sent.replica for sent in pipeline.decode.requests] == ["d0/0", "d1/0"]
    first, second = (request.exclude for request, _ in pipeline.router.placements)
    assert (first, set(second)) == ((), {"d0/0", "d0/1"})


def test_slots_are_those_of_a_rank() -> None:
    fleet: Any = FakeFleet(good_decode)
    fleet.directory.publish({"a": {RANKS: 2, SLOTS: 3}})
    fleet.directory.update_reports({"a": {RANKS: [{QUEUE: {"calls": calls}} for calls in (1, 4)]}})
    starts = DecodeStartEstimator(fleet)
    assert [starts.num_free_slots(worker) for worker in fleet.live_workers] == [2, 0]


def test_the_router_leases_and_loses_ranks() -> None:
    state = router_state(workers=0, table=None, policy="round-robin")
    state.ingresses.set_reachable_workers("c", WORKERS)
    leases = [place_one(state, f"{number}") for number in range(8)]
    assert [lease.worker for lease in leases] == [*WORKERS, *WORKERS]
    state.ingresses.set_reachable_workers("c", WORKERS[2:])
    assert state.positions.workers == [None, None, *WORKERS[2:]]
    assert {place_one(state, f"later {number}").worker for number in range(4)} == set(WORKERS[2:])


async def test_each_rank_reports_its_steps_and_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_reporter, "_REPORT_PERIOD_S", 0.001)
    context = SimpleNamespace(replica_id=SimpleNamespace(unique_id="a"))
    monkeypatch.setattr(decode_reporter.serve, "get_replica_context", lambda: context)
    observe = AsyncMock(return_value=StepAnswer(3.0, True))
    monkeypatch.setattr(decode_reporter, "find_actor", lambda name: Mock(observe_steps=Mock(remote=observe)))
    engine: Any = SimpleNamespace(
        ranks=lambda: 2,
        take_steps=lambda rank: StepSums(steps=rank),
        prefix_cache=lambda: PrefixCacheSize(32, 960),
        take_prefix_changes=lambda *, full: None,
    )
    reporter = decode_reporter.DecodeReporter(engine, "r", lambda: 0)
    task = asyncio.create_task(reporter.run())
    await wait_until(lambda: observe.await_count >= 2)
    task.cancel()
    steps, *cache, _ = observe.await_args_list[0].args
    assert {name: sums.steps for name, sums in steps.items()} == {"a/0": 0, "a/1": 1}
    assert cache == [(32, 960), None]
    assert reporter.queued == 3.0  # calls of both ranks, for the autoscaler
