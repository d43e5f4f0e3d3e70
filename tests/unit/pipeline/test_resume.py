"""Answers resume after an engine is lost: no token is lost or repeated."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eldr_serve.channel import ChannelLostError
from eldr_serve.engine.report_fields import KV_USAGE, REPORT_NUMBER
from eldr_serve.errors import OverloadedError
from eldr_serve.fleet.kv_usage import KvUsage
from eldr_serve.pipeline.context.request_context import RequestContext
from eldr_serve.queues.call_rate_limiter import CallRateLimiter
from tests.support.clock import Clock
from tests.support.fake_fleet import TOKEN_IDS, answer_with, in_turn, prefill_result, refusal
from tests.support.request_path import (
    END,
    EVENTS,
    TOKENS,
    WHOLE,
    Pipeline,
    good_prefill,
    pack_ids,
    request_context,
)

LOST = ChannelLostError("it is dead")


class Engines:
    """Decode engines that generate tokens 0, 1, 2 and so on. Each call fails after a number of frames.

    Args:
        cuts: (frames, error) of each call; without an error the call ends there.
        sizes: tokens of each frame, repeated.
        send_ids: whether frames have token ids.
    """

    def __init__(self, *cuts: Any, sizes: list[int] | None = None, send_ids: bool = True) -> None:
        self.cuts, self.sizes, self.send_ids = list(cuts), sizes or [1], send_ids

    async def __call__(self, sent: Any) -> AsyncIterator[Any]:
        at, frames = len(sent.header["generated"]) // 4, 0
        assert sent.header["generated"] == pack_ids(*range(at))
        assert sent.header["created"] == (77 if at and sent.fields["stream"] else None)
        cut, error = self.cuts.pop(0) if self.cuts else (None, None)
        while True:
            if frames == cut:
                if error is None:
                    return
                raise error
            size = min(self.sizes[frames % len(self.sizes)], TOKENS - at)
            ids = range(at, at + size)
            at, frames = at + size, frames + 1
            payload = b"".join(EVENTS[token] for token in ids) if sent.fields["stream"] else b""
            if at == TOKENS:
                payload = payload + END if sent.fields["stream"] else b"".join(EVENTS)
            yield (payload, size, pack_ids(*ids)) if self.send_ids else (payload, size)
            if at == TOKENS:
                if self.cuts:  # the engine is lost after its last frame
                    raise LOST
                return


@given(
    st.integers(0, TOKENS), st.lists(st.integers(1, 4), min_size=1, max_size=3), st.booleans(), st.booleans()
)
async def test_an_answer_resumes_wherever_its_engine_is_lost(
    cut: int, sizes: list[int], stream: bool, dies: bool
) -> None:
    pipeline = Pipeline(decode=Engines((cut, LOST if dies else refusal(500)), sizes=sizes))
    answer = await pipeline.run(stream=stream)
    assert answer == (WHOLE + END if stream else WHOLE)
    first, *rest = pipeline.decode.requests
    for second in rest:
        assert second.replica != first.replica
        assert second.header["id"] == first.header["id"]  # the client sees this id
        assert second.header["token_ids"] == first.header["token_ids"] == TOKEN_IDS
        assert pipeline.prefill.requests[-1].header["generated"] == second.header["generated"]
    assert pipeline.router.tokens[-1] == TOKENS
    resumed = bool(rest and rest[0].header["generated"])
    assert ("resumed" in pipeline.counters.events) == resumed


async def test_a_stream_resumes_once() -> None:
    pipeline = Pipeline(decode=Engines((3, LOST), (2, LOST)), decode_attempts=9)
    answer = await pipeline.run(stream=True)
    assert answer.startswith(b"".join(EVENTS[:5]) + b'data: {"error"')
    assert b'"engine_lost"' in answer
    assert len(pipeline.decode.requests) == 2
    assert pipeline.counters.events[-1] == "streams_lost"


async def test_a_stream_that_has_lost_too_many_engines_does_not_resume() -> None:
    pipeline = Pipeline(decode=Engines((0, LOST), (3, LOST)), max_lost_engines=2)
    answer = await pipeline.run(stream=True)
    assert answer.startswith(b"".join(EVENTS[:3]) + b'data: {"error"')
    assert len(pipeline.decode.requests) == 2


async def test_a_stream_whose_call_ends_before_its_last_event_resumes() -> None:
    pipeline = Pipeline(decode=Engines((3, None)))
    assert await pipeline.run(stream=True) == WHOLE + END
    assert "resumed" in pipeline.counters.events


async def test_a_stream_resumes_even_if_one_decode_attempt_is_allowed() -> None:
    pipeline = Pipeline(decode=Engines((3, LOST)), decode_attempts=1)
    assert await pipeline.run(stream=True) == WHOLE + END
    pipeline = Pipeline(decode=Engines((3, LOST), (0, LOST)), decode_attempts=1)
    assert b'"engine_lost"' in await pipeline.run(stream=True)
    assert len(pipeline.decode.requests) == 2


async def test_a_stream_resumes_on_a_third_engine() -> None:
    pipeline = Pipeline(decode=Engines((3, LOST), (0, LOST)))
    assert await pipeline.run(stream=True) == WHOLE + END
    assert [sent.replica for sent in pipeline.decode.requests] == ["d0", "d1", "d2"]


async def test_an_unstreamed_answer_resumes_repeatedly() -> None:
    pipeline = Pipeline(decode=Engines((3, LOST), (2, LOST)))
    assert await pipeline.run(stream=False) == WHOLE
    assert pipeline.decode.requests[-1].header["generated"] == pack_ids(*range(5))
    assert pipeline.router.resumed_at == [0, 3, 5]  # so these tokens are not counted as new ones


async def test_without_token_ids_a_stream_ends_and_an_unstreamed_answer_starts_again() -> None:
    lost = await Pipeline(decode=Engines((3, LOST), send_ids=False)).run(stream=True)
    assert lost.startswith(b"".join(EVENTS[:3]) + b'data: {"error"')
    pipeline = Pipeline(decode=Engines((3, LOST), send_ids=False))
    assert await pipeline.run(stream=False) == WHOLE
    assert pipeline.decode.requests[-1].header["generated"] == b""


@pytest.mark.parametrize("stream", [True, False])
async def test_a_loss_after_the_end_of_an_answer_has_no_effect(stream: bool) -> None:
    pipeline = Pipeline(decode=Engines((None, None), (None, None)))
    assert await pipeline.run(stream=stream) == (WHOLE + END if stream else WHOLE)
    assert len(pipeline.decode.requests) == 1


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("failure", [refusal(400), refusal(503), LOST])
async def test_a_resumed_answer_is_prefilled_by_its_decode_engine_if_its_second_prefill_fails(
    failure: Exception, stream: bool
) -> None:
    """A prompt and its generated tokens may exceed a prefill engine's limit."""
    prefill = in_turn(answer_with(prefill_result()), answer_with(failure))
    pipeline = Pipeline(prefill=prefill, decode=Engines((3, LOST)))
    assert await pipeline.run(stream=stream) == (WHOLE + END if stream else WHOLE)
    second = pipeline.decode.requests[-1].header
    assert (second["kv_transfer_params"], second["generated"]) == ({}, pack_ids(0, 1, 2))
    assert second["token_ids"] == TOKEN_IDS
    assert pipeline.counters.events == ["prefills", "prefilled_by_decode", "resumed"]


async def test_the_counts_of_a_resumed_answer_are_sent_with_their_number_of_tokens() -> None:
    prefill = in_turn(good_prefill, good_prefill, answer_with(prefill_result()))
    pipeline = Pipeline(prefill=prefill, decode=Engines((3, LOST), (2, LOST)))
    assert await pipeline.run(stream=False) == WHOLE
    assert [request.counted_tokens for request, _ in pipeline.router.placements] == [7, 7 + 3, 7]
    assert [counts is None for _, counts in pipeline.router.placements] == [False, False, True]


async def test_a_prefill_replica_is_not_blamed_for_an_attempt_without_it() -> None:
    prefill = in_turn(answer_with(prefill_result()), answer_with(refusal(400)))
    pipeline = Pipeline(prefill=prefill, decode=Engines((3, LOST), (0, refusal(500))))
    context = request_context(stream=False)
    assert b"".join([chunk async for chunk in pipeline.path.generate(context)]) == WHOLE
    assert context.failures.decode_workers == ["d0", "d1"]
    assert context.failures.prefill_replicas == []


async def test_a_resumed_answer_is_prefilled_by_its_decode_engine_if_prefill_engines_are_full() -> None:
    full = {KV_USAGE: 1.0, REPORT_NUMBER: 0}
    pipeline = Pipeline(decode=Engines((3, LOST)), replica_wait_s=0.0)
    kv_usage = pipeline.prefill.directory.kv_usage = KvUsage(0.9)

    async def decode(sent: Any) -> AsyncIterator[Any]:
        kv_usage.update({"p0": full, "p1": full})
        async for chunk in engines(sent):
            yield chunk

    engines, pipeline.decode.answer = pipeline.decode.answer, decode
    assert await pipeline.run(stream=True) == WHOLE + END
    assert pipeline.counters.events == ["prefills", "prefilled_by_decode", "resumed"]


async def test_a_stream_that_no_engine_resumes_ends_with_an_error() -> None:
    pipeline = Pipeline(decode=Engines((3, LOST), *[(0, refusal(400))] * 9), decode_attempts=2)
    answer = await pipeline.run(stream=True)
    assert answer.startswith(b"".join(EVENTS[:3]) + b'data: {"error"')
    assert b"failed: no; send the request again" in answer


async def test_an_unstreamed_answer_that_an_engine_does_not_resume_begins_again() -> None:
    pipeline = Pipeline(decode=Engines((3, LOST), (0, refusal(400))))
    assert await pipeline.run(stream=False) == WHOLE
    assert [sent.header["generated"] for sent in pipeline.decode.requests] == [b"", pack_ids(0, 1, 2), b""]
    assert pipeline.router.resumed_at == [0, 3, 0]


async def test_engines_that_refuse_resumed_answers_are_not_ejected() -> None:
    def decode(sent: Any) -> AsyncIterator[Any]:
        return answer_with(refusal(400))(sent) if sent.header["generated"] else Engines((3, LOST))(sent)

    pipeline = Pipeline(decode=decode, decode_attempts=2)
    for _ in range(4):
        assert b'"engine_lost"' in await pipeline.run(stream=True)
    assert "ejected" not in pipeline.counters.events


async def test_a_limited_number_of_answers_is_prefilled_again_at_once() -> None:
    go_on = asyncio.Event()
    first = asyncio.Event()

    async def prefill(sent: Any) -> AsyncIterator[Any]:
        if sent.header["generated"]:
            first.set()
            await go_on.wait()
        yield prefill_result()

    decode = Engines((3, LOST), (3, LOST))
    pipeline = Pipeline(prefill=prefill, decode=decode, retries_at_once=1, retry_wait_s=0.05)

    async def answer() -> bytes:
        return b"".join([chunk async for chunk in pipeline.path.generate(request_context(stream=True))])

    answers = [asyncio.create_task(answer()) for _ in range(2)]
    await first.wait()
    done, _ = await asyncio.wait(answers, return_when=asyncio.FIRST_COMPLETED, timeout=20)
    go_on.set()
    assert b'"engine_lost"' in done.pop().result()
    assert WHOLE + END in await asyncio.gather(*answers)


def retried_context() -> RequestContext:
    """Return the context of a request that needs a permit."""
    context = request_context()
    context.failures.prefills = 1
    return context


@pytest.mark.parametrize(
    ("failure", "message"),
    [
        (LOST, "too many requests have lost their engine"),
        (refusal(500), "are tried again after a call to an engine has failed"),
    ],
)
async def test_an_unstreamed_answer_that_cannot_resume_in_time_is_refused(
    failure: Exception, message: str
) -> None:
    pipeline = Pipeline(decode=Engines((3, failure)), retries_at_once=1, retry_wait_s=0.0)
    async with pipeline.services.retries.permit(retried_context()):
        with pytest.raises(OverloadedError, match=message):
            await pipeline.run(stream=False)


async def test_a_stream_that_cannot_resume_in_time_says_so() -> None:
    pipeline = Pipeline(decode=Engines((3, LOST)), retries_at_once=1, retry_wait_s=0.0)
    async with pipeline.services.retries.permit(retried_context()):
        answer = await pipeline.run(stream=True)
    assert b"could not continue on another engine: too many requests have lost their engine" in answer


def take(rate: CallRateLimiter) -> bool:
    """Take a permit if one is free now, and return whether it was."""
    return rate.reserve(0.0) is not None


def test_a_rate_limits_the_permits_of_any_second() -> None:
    clock = Clock()
    rate = CallRateLimiter(2.0, clock=clock)
    assert [take(rate) for _ in range(3)] == [True, True, False]
    clock.now += 0.5
    assert [take(rate) for _ in range(2)] == [True, False]
    clock.now += 60.0
    assert [take(rate) for _ in range(3)] == [True, True, False]
    assert not take(CallRateLimiter(0.0, clock=clock))


def test_reserved_permits_follow_at_the_rate() -> None:
    rate = CallRateLimiter(2.0, clock=lambda: 0.0)
    assert [rate.reserve(1.0) for _ in range(5)] == [0.0, 0.0, 0.5, 1.0, None]
    rate.give_back()
    assert [rate.reserve(1.0), rate.reserve(1.0)] == [1.0, None]
    assert not take(rate)
    assert CallRateLimiter(0.0, clock=lambda: 0.0).reserve(1e9) is None


async def test_the_prefill_of_a_resumed_answer_counts_the_generated_tokens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pipeline = Pipeline(decode=Engines((5, LOST)))
    finished: list[int] = []
    monkeypatch.setattr(
        pipeline.services.prefill_admission, "finish", lambda ticket, tokens: finished.append(tokens)
    )
    assert await pipeline.run(stream=True) == WHOLE + END
    assert finished == [len(TOKEN_IDS) // 4, len(TOKEN_IDS) // 4 + 5]
