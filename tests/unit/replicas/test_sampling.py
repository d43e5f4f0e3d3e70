"""A decode replica samples requests by the pool's share and sends the samples to the pool."""

import asyncio
import logging
import re
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager, suppress
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError

from eldr_serve.engine.calls import EXPERT_COUNTS_KEY, WARM_UP_ID_PREFIX
from eldr_serve.experts.sample import ExpertSample
from eldr_serve.experts.signature import pack_counts
from eldr_serve.replicas import sample_sender, sampling, servers
from eldr_serve.replicas.sample_sender import SampleSender
from eldr_serve.replicas.sampling import MAX_SAMPLED, Sampler
from tests.support.channel_calls import read_all
from tests.support.engine_server import COUNTS, generate, running_tasks, serving
from tests.support.fake_router import wait_until

# The destructor is a coroutine, which Serve awaits.
pytestmark = pytest.mark.filterwarnings("ignore:coroutine 'EngineServer.__del__'")

SAMPLE = ExpertSample("r", "d", np.zeros(2, np.uint32), COUNTS[0], COUNTS[1], 3)


def samples(*names: str) -> list[ExpertSample]:
    return [replace(SAMPLE, request_id=name) for name in names]


class Pool:
    """A pool's actors by name. The next calls raise `errors` in turn."""

    def __init__(self, *names: str, share: float = 1.0) -> None:
        self.shares = dict.fromkeys(names, share)
        self.batches: list[tuple[str, list[ExpertSample]]] = []
        self.errors: list[Exception] = []
        self.looked_up: list[str] = []

    def find(self, name: str) -> Any:
        self.looked_up.append(name)
        if name not in self.shares:
            raise ValueError(f"no actor {name}")

        async def add(batch: list[ExpertSample]) -> float:
            if self.errors:
                raise self.errors.pop(0)
            self.batches.append((name, batch))
            return self.shares[name]

        return SimpleNamespace(add=SimpleNamespace(remote=add))

    @property
    def ids(self) -> list[str]:
        return [sample.request_id for _, batch in self.batches for sample in batch]


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 1.0])
def test_the_share_of_sampled_requests_is_the_configured_one(share: float) -> None:
    sampler = Sampler(share)
    total = 0
    for number in range(4000):
        with sampler.track(f"r-{number}") as sampled:
            total += sampled
    assert total == pytest.approx(4000 * share, abs=120 if 0 < share < 1 else 0)
    assert sampler.running == 0


def test_a_retried_request_has_the_same_decision() -> None:
    one, other = Sampler(0.5), Sampler(0.5)
    for number in range(200):
        with one.track(f"{number}") as first, other.track(f"{number}") as second:
            assert first == second


def test_the_number_of_concurrent_samples_is_limited() -> None:
    sampler = Sampler()
    with ExitStack() as running:
        entered = [running.enter_context(sampler.track(f"{number}")) for number in range(MAX_SAMPLED + 5)]
        assert entered == [True] * MAX_SAMPLED + [False] * 5
    with sampler.track("next") as sampled:
        assert sampled


def test_a_failed_request_frees_its_sampling_slot() -> None:
    sampler = Sampler()
    for _ in range(MAX_SAMPLED + 1):
        with suppress(RuntimeError), sampler.track("fails") as sampled:
            assert sampled
            raise RuntimeError
    assert sampler.running == 0


async def test_samples_are_divided_among_the_actors_by_request_id() -> None:
    names = [f"signature-pool:eldr:{index}" for index in range(3)]
    pool = Pool(*names)
    pool.shares = dict(zip(names, (0.2, 0.4, 0.6), strict=True))
    client = SampleSender("eldr", 3, pool.find)
    ids = [f"r{number}" for number in range(60)]
    assert await client.add(samples(*ids)) == pytest.approx(0.4)
    assert sorted(pool.ids) == sorted(ids)
    assert {name for name, _ in pool.batches} == set(names)
    assert (client.sent, client.dropped) == (60, 0)
    first = dict(pool.batches)
    pool.batches.clear()
    await client.add(samples(*ids))
    assert dict(pool.batches) == first  # each id belongs to one actor


async def test_each_actor_is_asked_for_its_share_without_samples() -> None:
    pool = Pool("signature-pool:eldr:0", "signature-pool:eldr:1", share=0.25)
    assert await SampleSender("eldr", 2, pool.find).add([]) == 0.25
    assert [batch for _, batch in pool.batches] == [[], []]


async def test_samples_for_a_lost_actor_are_dropped_with_one_line(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, sample_sender.__name__)
    pool = Pool()
    client = SampleSender("eldr", 1, pool.find)
    assert [await client.add(samples("a", "b")) for _ in range(3)] == [1.0] * 3
    assert (client.sent, client.dropped) == (0, 6)
    pool.shares["signature-pool:eldr:0"] = 0.5
    assert await client.add(samples("c")) == 0.5
    pool.errors = [ActorUnavailableError("test", None)] * 2
    assert [await client.add(samples("d")) for _ in range(3)] == [0.5] * 3
    assert (client.sent, client.dropped, pool.ids) == (2, 8, ["c", "d"])
    lines = [re.search(r":eldr:0 ([\w ]+)", line)[1] for line in caplog.messages]
    assert lines == ["cannot be reached", "takes samples again"] * 2


async def test_an_actor_is_looked_up_again_only_after_it_died() -> None:
    pool = Pool("signature-pool:eldr:0")
    client = SampleSender("eldr", 1, pool.find)
    pool.errors = [ActorUnavailableError("test", None)]
    await client.add(samples("a"))
    await client.add(samples("b"))
    assert len(pool.looked_up) == 1
    pool.errors = [ActorDiedError()]
    await client.add(samples("c"))
    await client.add(samples("d"))
    assert (len(pool.looked_up), pool.ids) == (2, ["b", "d"])


async def test_a_call_to_an_actor_has_a_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sample_sender, "_CALL_TIMEOUT_S", 0.01)
    never = SimpleNamespace(add=SimpleNamespace(remote=lambda batch: asyncio.Event().wait()))
    client = SampleSender("eldr", 1, lambda name: never)
    assert await client.add(samples("a")) == 1.0
    assert client.dropped == 1


async def run(channel: Any, name: str, **header: Any) -> None:
    """Run a decode request of 4 tokens to its end."""
    kv = {EXPERT_COUNTS_KEY: pack_counts(COUNTS[1])}
    await read_all(generate(channel, name, 4, kv=kv, token_ids=bytes(4 * 5), domain="poems", **header))


@asynccontextmanager
async def sampling_replica(monkeypatch: pytest.MonkeyPatch, pool: Pool) -> AsyncIterator[tuple[Any, Any]]:
    """Run a decode replica with this pool, and yield it and a channel to it."""
    monkeypatch.setattr(sample_sender.SampleSender.__init__, "__defaults__", (pool.find,))
    monkeypatch.setattr(sampling, "_PERIOD_S", 0.001)
    kwargs = {"router_name": "router", "application": "mine", "num_pool_actors": 1}
    async with serving(servers.DecodeServer, **kwargs) as served:
        yield served


async def test_a_decode_replica_sends_samples_and_takes_the_share(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = Pool("signature-pool:mine:0", share=0.0)
    async with sampling_replica(monkeypatch, pool) as (server, channel):
        await run(channel, WARM_UP_ID_PREFIX + "up")
        await run(channel, "resumed", generated=bytes(8))
        await run(channel, "first")
        await wait_until(lambda: pool.ids)
        ((_, (sample,)),) = pool.batches
        assert (sample.request_id, sample.domain) == ("first", "poems")
        assert (len(sample.token_ids), sample.decode_steps) == (5, 3)
        np.testing.assert_array_equal(sample.prefill_counts, COUNTS[1])
        assert sample.decode_counts.shape == COUNTS[1].shape
        await wait_until(lambda: server._sampler.share == 0.0)
        await run(channel, "second")
        assert server._engine.take_samples() == []
        pool.shares["signature-pool:mine:0"] = 1.0  # the replica polls the pool even without samples
        await wait_until(lambda: server._sampler.share == 1.0)
        await run(channel, "third")
        await wait_until(lambda: pool.ids == ["first", "third"])


async def test_requests_are_served_without_the_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    async with sampling_replica(monkeypatch, Pool()) as (server, channel):
        for number in range(3):
            await run(channel, f"{number}")
        await wait_until(lambda: server._pool.dropped == 3)
        assert "the report of samples" in running_tasks()


async def test_without_a_pool_nothing_is_sampled() -> None:
    async with serving(servers.DecodeServer, router_name="router") as (server, channel):
        await run(channel, "first")
        assert server._engine.take_samples() == []
