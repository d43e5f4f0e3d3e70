"""More prompts at once than engines can compute within the bound; fake engines, virtual time."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any
from unittest.mock import patch

import msgspec
import pytest
from fake_fleet import FakeFleet, Sent, answer_with, prefill_result
from request_path import Client, good_decode, request_context

from eldr_serve.errors import Overloaded
from eldr_serve.pipeline.engines import Engines
from eldr_serve.pipeline.path import RequestPath
from eldr_serve.pipeline.path_options import PathOptions
from eldr_serve.queues.prefill_queue import QUEUE
from eldr_serve.replicas.decode_turns import SLOTS
from tests.faults.virtual_time import VirtualLoop

RATE = 9000.0  # throughput of an engine, tokens/s
TOKENS = 1500
PREFILLED = msgspec.msgpack.encode({"tokens": TOKENS, "token_ids": bytes(4 * TOKENS), "kv": {}})


def on_virtual_time(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run a coroutine on virtual time, which advances when all tasks wait."""
    loop = VirtualLoop(random.Random(0))
    with patch("time.monotonic", loop.time):
        loop.run(main())
    assert not loop.errors


class Engine:
    """Computes prompts in order of arrival, but never those in `stuck`."""

    def __init__(self, answer: bytes, stuck: Callable[[Sent], bool] = lambda sent: False) -> None:
        self._turns: dict[str, asyncio.Lock] = {}
        self._answer = answer
        self._stuck = stuck

    async def __call__(self, sent: Sent) -> AsyncIterator[bytes]:
        if self._stuck(sent):
            await asyncio.Event().wait()
        async with self._turns.setdefault(sent.replica, asyncio.Lock()):
            await asyncio.sleep(TOKENS / RATE)
        yield self._answer


class World:
    """The request path with one prefill engine, or with whole engines."""

    def __init__(self, prefill: Any = None, decode: Any = good_decode, *, whole: bool = False) -> None:
        names = () if whole else ("p0",)
        self.prefill = FakeFleet(prefill or Engine(PREFILLED), *names)
        self.decode = FakeFleet(decode, "d0", "d1", "d2")
        self.client: Any = Client()
        fleets: Any = self.prefill, self.decode
        self.path = RequestPath(
            engines=Engines(*fleets, whole=whole), client=self.client, options=PathOptions()
        )
        self.statuses: Counter[int] = Counter()
        self.refused_s: list[float] = []
        self.tries: list[int] = []

    async def ask(self, number: int) -> None:
        """Send a request, and retry it as refusals say."""
        loop = asyncio.get_running_loop()
        prompt, tries = [number] * TOKENS, 0
        while True:
            tries += 1
            sent_s = loop.time()
            try:
                run = self.path.generate(request_context(prompt=prompt, stream=True))
                assert b"".join([chunk async for chunk in run])
            except Overloaded as refusal:
                self.statuses[refusal.status] += 1
                self.refused_s.append(loop.time() - sent_s)
                await asyncio.sleep((refusal.retry_after_s or 0) + 0.01 * random.random())
            else:
                self.statuses[200] += 1
                self.tries.append(tries)
                return


@pytest.mark.parametrize("before", [0, 100])
def test_of_a_thousand_prompts_each_is_answered_or_told_at_once_when_to_come_again(before: int) -> None:
    """After a hundred prompts the rate is known, and no request is refused twice."""
    world = World()

    async def main() -> None:
        await asyncio.gather(*map(world.ask, range(before)))
        world.tries.clear()
        await asyncio.gather(*map(world.ask, range(before, before + 1000)))

    on_virtual_time(main)
    assert world.statuses[200] == before + 1000
    assert set(world.statuses) == {200, 503}
    assert max(world.refused_s) <= 2.0
    assert max(world.tries) <= (2 if before else 4)
    assert len(world.prefill.requests) == before + 1000  # no prompt is sent twice
    assert not {"set_aside", "prefill_retries"} & set(world.client.events)
    assert world.client.events.count("refused_prefill_backlog") == len(world.refused_s)


def test_a_wait_behind_others_is_no_failure_of_an_engine() -> None:
    """Prompts wait longer than the limit if the engine is slower than the rate that admitted them."""
    world = World()

    async def main() -> None:
        world.path.prefill.queues._bound_s = 10**6
        await asyncio.gather(*map(world.ask, range(700)))  # 117 s

    on_virtual_time(main)
    assert world.statuses == {200: 700}
    assert len(world.prefill.requests) == 700
    assert "set_aside" not in world.client.events


def test_a_prompt_that_others_overtake_is_tried_again() -> None:
    first: list[str] = []

    def stuck(sent: Sent) -> bool:
        first.append(sent.header["id"])
        return sent.header["id"] == first[0]

    world = World(Engine(PREFILLED, stuck))

    async def main() -> None:
        await asyncio.gather(*map(world.ask, range(5)))

    on_virtual_time(main)
    assert world.statuses == {200: 5}
    assert len(world.prefill.requests) == 6
    assert world.client.events.count("prefill_retries") == 1


def test_an_engine_that_computes_nothing_is_set_aside() -> None:
    world = World(answer_with(asyncio.Event()))

    async def main() -> None:
        found = await asyncio.gather(*map(one, range(5)), return_exceptions=True)
        assert {type(error) for error in found} == {Overloaded}

    async def one(number: int) -> None:
        async for _ in world.path.generate(request_context(prompt=[number] * TOKENS)):
            pass

    on_virtual_time(main)
    assert "set_aside" in world.client.events


@pytest.mark.parametrize("told", [0, 9])
def test_a_decode_call_without_a_seat_waits_for_one(told: int) -> None:
    """The calls are those of this ingress, or of others as reported by the replica."""
    slots = asyncio.Semaphore(2)

    async def decode(sent: Sent) -> AsyncIterator[bytes]:
        async with slots:
            for _ in range(20):
                yield b"x"
                await asyncio.sleep(10.0)

    world = World(answer_with(prefill_result(do_remote_prefill=True)), decode)
    world.decode.directory.publish({"d0": {SLOTS: 2}})

    async def main() -> None:
        world.decode.directory.sample({"d0": {QUEUE: {"number": 0, "calls": told}}})
        await asyncio.gather(*map(world.ask, range(3 if told else 6)))

    on_virtual_time(main)
    assert len(world.decode.requests) == len(world.tries) == (3 if told else 6)
    assert "set_aside" not in world.client.events


def test_whole_engines_are_bounded_by_their_prompts_too() -> None:
    world = World(decode=Engine(b"data: [DONE]\n\n"), whole=True)

    async def main() -> None:
        world.decode.directory.publish({"d0": {}})
        await asyncio.gather(*map(world.ask, range(600)))

    on_virtual_time(main)
    assert world.statuses[200] == 600
    assert world.statuses[503] > 0
    assert max(world.refused_s) <= 2.0
    assert max(world.tries) <= 4
    assert len(world.decode.requests) == 600
    assert "set_aside" not in world.client.events
