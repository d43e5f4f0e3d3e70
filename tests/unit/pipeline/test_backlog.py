"""More prompts than fake engines can compute within the bound on waiting, on virtual time."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any

import msgspec
import pytest

from eldr_serve.engine.protocol import EngineRequest
from eldr_serve.engine.report_fields import KV_USAGE, QUEUE, REPORT_NUMBER, SLOTS
from eldr_serve.errors import OverloadedError
from eldr_serve.fleet.kv_usage import KvUsage
from eldr_serve.pipeline.context.request_context import RequestContext
from eldr_serve.pipeline.fleets import Fleets
from eldr_serve.pipeline.path import RequestPath
from eldr_serve.pipeline.path_options import PathOptions, PrefillRouterOptions
from eldr_serve.pipeline.services import Services
from eldr_serve.request import Request, RequestFields
from tests.support.fake_fleet import FakeFleet, Sent, answer_with, prefill_result
from tests.support.request_path import (
    FakeRouterClient,
    RecordedCounters,
    good_decode,
    on_virtual_time,
    request_context,
)

RATE = 9000.0  # throughput of an engine, tokens/s
TOKENS = 1500
PREFILLED = msgspec.msgpack.encode({"token_ids": bytes(4 * TOKENS), "kv_transfer_params": {}})


class Engine:
    """An engine that computes prompts in order of arrival, but never those in `stuck`."""

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


class Backlog:
    """The request path with one prefill engine, or with whole replicas."""

    def __init__(self, prefill: Any = None, decode: Any = good_decode, *, whole: bool = False) -> None:
        names = () if whole else ("p0",)
        self.prefill = FakeFleet(prefill or Engine(PREFILLED), *names)
        self.decode = FakeFleet(decode, "d0", "d1", "d2")
        self.router: Any = FakeRouterClient()
        self.counters = RecordedCounters()
        fleets: Any = self.prefill, self.decode
        self.services = Services(
            fleets=Fleets(*fleets, PrefillRouterOptions(), decode_engines_prefill=whole),
            router_client=self.router,
            counters=self.counters,
            options=PathOptions(),
        )
        self.path = RequestPath(self.services)
        self.statuses: Counter[int] = Counter()
        self.refused_s: list[float] = []
        self.tries: list[int] = []

    async def send(self, number: int) -> None:
        """Send a request, and retry it at the times that refusals name."""
        loop = asyncio.get_running_loop()
        prompt, tries = [number] * TOKENS, 0
        while True:
            tries += 1
            sent_s = loop.time()
            try:
                stream = self.path.generate(request_context(prompt=prompt, stream=True))
                assert b"".join([chunk async for chunk in stream])
            except OverloadedError as refusal:
                self.statuses[refusal.status] += 1
                self.refused_s.append(loop.time() - sent_s)
                await asyncio.sleep((refusal.retry_after_s or 0) + 0.01 * random.random())
            else:
                self.statuses[200] += 1
                self.tries.append(tries)
                return

    def send_all(self, numbers: Iterable[int]) -> None:
        """Send these requests together and run them to their end."""

        async def main() -> None:
            await asyncio.gather(*map(self.send, numbers))

        on_virtual_time(main)


@pytest.mark.parametrize("before", [0, 100])
def test_each_prompt_is_answered_or_refused_at_once_with_a_retry_time(before: int) -> None:
    """After a hundred prompts the rate is known, and no request is refused twice."""
    backlog = Backlog()

    async def main() -> None:
        await asyncio.gather(*map(backlog.send, range(before)))
        backlog.tries.clear()
        await asyncio.gather(*map(backlog.send, range(before, before + 1000)))

    on_virtual_time(main)
    assert backlog.statuses[200] == before + 1000
    assert set(backlog.statuses) == {200, 503}
    assert max(backlog.refused_s) <= 2.0
    assert max(backlog.tries) <= (2 if before else 4)
    assert len(backlog.prefill.requests) == before + 1000  # no prompt is sent twice
    assert not {"ejected", "prefill_retries"} & set(backlog.counters.events)
    assert backlog.counters.events.count("refused_prefill_backlog") == len(backlog.refused_s)


def test_a_wait_behind_other_prompts_is_no_failure_of_an_engine() -> None:
    """Prompts wait longer than the limit if the engine is slower than the rate that admitted them."""
    backlog = Backlog()
    backlog.services.prefill_admission.queues._bound_s = 10**6
    backlog.send_all(range(700))  # 117 s
    assert backlog.statuses == {200: 700}
    assert len(backlog.prefill.requests) == 700
    assert "ejected" not in backlog.counters.events


def test_a_prompt_that_others_overtake_is_retried() -> None:
    first: list[str] = []

    def stuck(sent: Sent) -> bool:
        first.append(sent.header["id"])
        return sent.header["id"] == first[0]

    backlog = Backlog(Engine(PREFILLED, stuck))
    backlog.send_all(range(5))
    assert backlog.statuses == {200: 5}
    assert len(backlog.prefill.requests) == 6
    assert backlog.counters.events.count("prefill_retries") == 1


def test_requests_that_wait_for_room_continue_at_once_in_order_of_arrival() -> None:
    backlog = Backlog()
    directory, waiters = backlog.prefill.directory, backlog.prefill.waiters
    directory.kv_usage = KvUsage(0.9)

    async def main() -> None:
        directory.update_reports({"p0": {KV_USAGE: 1.0, REPORT_NUMBER: 0}})
        tasks = []
        for number in range(5):
            tasks.append(asyncio.create_task(backlog.send(number)))
            await asyncio.sleep(0.1)
            waiters.wake()  # there is no room yet, and each request keeps its turn
        assert not backlog.prefill.requests
        directory.update_reports({"p0": {KV_USAGE: 0.5, REPORT_NUMBER: 1}})
        waiters.wake()
        await asyncio.sleep(0.001)
        assert [sent.fields["prompt"][0] for sent in backlog.prefill.requests] == [0, 1, 2, 3, 4]
        await asyncio.gather(*tasks)

    on_virtual_time(main)
    assert backlog.statuses == {200: 5}


def test_waits_for_room_and_for_a_decode_replica_end_at_their_limit() -> None:
    backlog, wait_s = Backlog(), PathOptions().replica_wait_s
    backlog.prefill.directory.kv_usage = KvUsage(0.9)

    async def main() -> None:
        time = asyncio.get_running_loop().time
        backlog.prefill.directory.update_reports({"p0": {KV_USAGE: 1.0, REPORT_NUMBER: 0}})
        with pytest.raises(OverloadedError, match="are full"):
            await anext(backlog.path.generate(request_context(stream=True)))
        assert time() == pytest.approx(wait_s)
        backlog.decode.lost = {"d0", "d1", "d2"}
        with pytest.raises(OverloadedError, match=f"no decode replica could be reached for {wait_s:g} s"):
            await anext(backlog.path.generate(request_context(stream=True)))
        assert time() == pytest.approx(2 * wait_s)

    on_virtual_time(main)


def test_a_full_replica_does_not_extend_the_limit_of_a_call_that_needs_no_slot() -> None:
    backlog, timeout_s = Backlog(decode=answer_with(asyncio.Event())), PathOptions().first_token_timeout_s
    backlog.decode.directory.publish({"d0": {SLOTS: 2}})
    backlog.decode.directory.update_reports({"d0": {QUEUE: {"number": 0, "calls": 3}}})

    async def main() -> None:
        async with asyncio.timeout(10 * timeout_s):
            with pytest.raises(OverloadedError, match="did not answer within"):
                await backlog.path.forward(EngineRequest("tokenize", b"{}"))
        assert asyncio.get_running_loop().time() == pytest.approx(timeout_s)

    on_virtual_time(main)


def test_an_engine_that_computes_nothing_is_ejected() -> None:
    backlog = Backlog(answer_with(asyncio.Event()))

    async def send_once(number: int) -> None:
        async for _ in backlog.path.generate(request_context(prompt=[number] * TOKENS)):
            pass

    async def main() -> None:
        errors = await asyncio.gather(*map(send_once, range(5)), return_exceptions=True)
        assert {type(error) for error in errors} == {OverloadedError}

    on_virtual_time(main)
    assert "ejected" in backlog.counters.events


@pytest.mark.parametrize("reported", [0, 9])
def test_a_decode_call_waits_for_a_slot(reported: int) -> None:
    """The calls are those of this ingress, or of others as reported by the replica."""
    slots = asyncio.Semaphore(2)

    async def decode(sent: Sent) -> AsyncIterator[bytes]:
        async with slots:
            for _ in range(20):
                yield b"x"
                await asyncio.sleep(10.0)

    backlog = Backlog(answer_with(prefill_result(do_remote_prefill=True)), decode)
    backlog.decode.directory.publish({"d0": {SLOTS: 2}})
    requests = 3 if reported else 6

    async def main() -> None:
        backlog.decode.directory.update_reports({"d0": {QUEUE: {"number": 0, "calls": reported}}})
        await asyncio.gather(*map(backlog.send, range(requests)))

    on_virtual_time(main)
    assert len(backlog.decode.requests) == len(backlog.tries) == requests
    assert "ejected" not in backlog.counters.events


def test_whole_replicas_bound_their_waiting_prompts_too() -> None:
    backlog = Backlog(decode=Engine(b"data: [DONE]\n\n"), whole=True)
    backlog.decode.directory.publish({"d0": {}})
    backlog.send_all(range(600))
    assert backlog.statuses[200] == 600
    assert backlog.statuses[503] > 0
    assert max(backlog.refused_s) <= 2.0
    assert max(backlog.tries) <= 4
    assert len(backlog.decode.requests) == 600
    assert "ejected" not in backlog.counters.events


def test_a_retry_is_recognised_by_its_tenant_and_body() -> None:
    def key(tenant: str, body: bytes) -> bytes:
        request = Request(method="chat", body=body, fields=RequestFields(), tenant=tenant)
        return RequestContext(request).resend_key

    assert key("a", b"x") == key("a", b"x")
    assert len({key(*one) for one in (("a", b"x"), ("b", b"x"), ("a", b"y"), ("", b"ax"))}) == 4
