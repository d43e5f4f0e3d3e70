"""Engines that say nothing, or fail now and then, although their channels are open."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from fake_fleet import answer_with, prefill_result, refusal
from fake_router import wait_until
from hypothesis import given
from hypothesis import strategies as st
from request_path import Pipeline, good_decode, good_prefill, request_context
from test_resume import END, WHOLE, packed

from eldr_serve.channel import Call, CallLate
from eldr_serve.pipeline import path
from eldr_serve.replicas.outliers import Outliers


def on(replica: str, answer: Any, others: Any = good_decode) -> Any:
    """A deployment one of whose replicas answers so."""
    return lambda sent: (answer if sent.replica == replica else others)(sent)


def going_on(*chunks: Any) -> Any:
    """Sends the first of these, or what follows them, if it is asked to go on."""
    first = answer_with(*chunks)
    rest = answer_with(
        (WHOLE[len(b"".join(c[0] for c in chunks if isinstance(c, tuple))) :] + END, 3, packed(1, 2, 3))
    )
    return lambda sent: (rest if sent.header["generated"] else first)(sent)


async def test_a_decode_engine_without_a_first_token_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(path, "_NOTICE_S", 0.1)
    pipeline = Pipeline(decode=on("d0", answer_with(asyncio.Event())), first_token_limit_s=0.05)
    assert await pipeline.run() == b"abc"
    first, second = pipeline.decode.requests
    assert first.cancelled
    assert pipeline.client.placed[1][0].exclude == ("d0",)
    lost, _ = pipeline.prefill.requests
    # Its blocks are free when the engine has left the call, not before.
    await wait_until(lambda: pipeline.prefill.released == [(lost.replica, lost.header["id"])])
    assert second.replica == "d1"


async def test_a_stream_that_stands_still_goes_on_elsewhere() -> None:
    pipeline = Pipeline(decode=going_on((WHOLE[:10], 1, packed(0)), asyncio.Event()), gap_limit_s=0.05)
    assert await pipeline.run(stream=True) == WHOLE + END
    first, second = pipeline.decode.requests
    assert first.cancelled
    assert second.header["generated"] == packed(0)


async def test_a_prefill_that_takes_too_long_is_tried_elsewhere_and_its_blocks_are_released() -> None:
    answers = iter([answer_with(asyncio.Event()), good_prefill])
    pipeline = Pipeline(prefill=lambda sent: next(answers)(sent), prefill_limit_s=0.05)
    assert await pipeline.run() == b"abc"
    first, second = pipeline.prefill.requests
    assert first.cancelled
    assert first.replica != second.replica
    assert pipeline.prefill.released == [(first.replica, first.header["id"])]


async def test_answers_that_say_nothing_before_their_end_have_no_limit() -> None:
    async def slow(sent: Any) -> Any:
        await asyncio.sleep(0.1)
        yield b"whole"

    pipeline = Pipeline(decode=slow, first_token_limit_s=0.01, gap_limit_s=0.01)
    assert await pipeline.run(n=2) == b"whole"


async def test_a_client_that_reads_slowly_is_not_an_engine_that_writes_slowly() -> None:
    more = asyncio.Event()

    async def steady(sent: Any) -> Any:
        for _ in range(20):
            yield b"x"
            await asyncio.sleep(0.005)
        more.set()

    pipeline = Pipeline(decode=steady, gap_limit_s=0.08)
    stream = pipeline.path.generate(request_context(stream=True))
    assert await anext(stream) == b"x"
    await more.wait()
    assert b"".join([chunk async for chunk in stream]) == b"x" * 19


async def test_a_replica_that_fails_again_and_again_gets_no_requests_for_a_while() -> None:
    pipeline = Pipeline(decode=on("d0", answer_with(refusal(500))), prefill=answer_with(prefill_result()))
    for _ in range(3):
        assert await pipeline.run() == b"abc"
    assert pipeline.client.events.count("set_aside") == 1
    pipeline.decode.sent.clear()
    assert await pipeline.run() == b"abc"
    assert [sent.replica for sent in pipeline.decode.requests] == ["d1"]
    assert pipeline.client.placed[-1][0].exclude == ("d0",)


async def test_a_replica_that_is_full_is_not_set_aside() -> None:
    pipeline = Pipeline(decode=on("d0", answer_with(refusal(503))))
    for _ in range(9):
        assert await pipeline.run() == b"abc"
    assert "set_aside" not in pipeline.client.events


async def test_a_call_is_late_once_and_tells_its_engine() -> None:
    said: list[bytes] = []
    channel: Any = type("Channel", (), {"send": lambda self, frame: said.append(frame)})()
    call = Call(channel, 1)
    call.expect(0.01, 0.02)
    with pytest.raises(CallLate, match="first token"):
        await call.read()
    assert len(said) == 1
    call.feed(b"late", 1)  # of no use any more
    call.finish(None)
    with pytest.raises(CallLate):
        await call.read()
    await call.end()


# -- who is set aside ----------------------------------------------------------------------------------


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_each_time_it_is_longer_until_it_answers() -> None:
    clock = Clock()
    outliers = Outliers(clock=clock)
    aside_s = []
    for _ in range(6):
        assert [outliers.failed("a") for _ in range(3)] == [False, False, True]
        assert not outliers.failed("a")  # a call of before
        began = clock.now
        while outliers.usable("abc") == ["b", "c"]:
            clock.now += 1.0
        aside_s.append(clock.now - began)
    assert aside_s == [10, 20, 40, 80, 120, 120]
    outliers.succeeded("a")
    assert [outliers.failed("a") for _ in range(3)] == [False, False, True]
    clock.now += 10.0
    assert outliers.usable("abc") == ["a", "b", "c"]


@given(st.lists(st.tuples(st.sampled_from("abcde"), st.booleans()), max_size=60))
def test_at_least_half_of_the_replicas_are_used(events: list[tuple[str, bool]]) -> None:
    outliers, row = Outliers(clock=lambda: 0.0), dict.fromkeys("abcde", 0)
    for name, fails in events:
        if fails:
            outliers.failed(name)
            row[name] += 1
        else:
            outliers.succeeded(name)
            row[name] = 0
        aside = {name for name in "abcde" if row[name] >= 3}
        used = set(outliers.usable("abcde"))
        assert used == (set("abcde") - aside if len(aside) <= 2 else set("abcde"))


def test_a_replica_that_has_gone_is_forgotten() -> None:
    outliers = Outliers(clock=lambda: 0.0)
    for _ in range(3):
        outliers.failed("a")
    assert outliers.usable("abc") == ["b", "c"]
    outliers.usable("bc")
    assert outliers.usable("abc") == ["a", "b", "c"]
