"""What an ingress does when an engine is lost in mid-answer: nothing is lost, nothing comes twice."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
from fake_fleet import TOKEN_IDS, answer_with, prefill_result, refusal
from hypothesis import given
from hypothesis import strategies as st
from request_path import Pipeline, request_context

from eldr_serve.channel import ChannelLost
from eldr_serve.errors import Overloaded
from eldr_serve.queues.rate import Rate
from eldr_serve.router.budget import KV_USAGE, SAMPLE, PrefillBudget

TOKENS = 12
END = b"data: [DONE]\n\n"
EVENTS = [b'data: {"created":77,"text":"%d"}\n\n' % number for number in range(TOKENS)]
LOST = ChannelLost("it is dead")


def packed(*ids: int) -> bytes:
    return np.asarray(ids, np.uint32).tobytes()


class Engines:
    """Decode engines that generate tokens 0, 1, ...; each call is cut so many frames after it begins.

    Args:
        sizes: tokens a frame.
        told: whether their ids are.
    """

    def __init__(self, *cuts: Any, sizes: list[int] | None = None, told: bool = True) -> None:
        self.cuts, self.sizes, self.told = list(cuts), sizes or [1], told

    async def __call__(self, sent: Any) -> AsyncIterator[Any]:
        at, frames = len(sent.header["generated"]) // 4, 0
        assert sent.header["generated"] == packed(*range(at))
        assert sent.header["created"] == (77 if at and sent.fields["stream"] else None)
        cut, error = self.cuts.pop(0) if self.cuts else (None, None)
        while True:
            if frames == cut:
                raise error
            size = min(self.sizes[frames % len(self.sizes)], TOKENS - at)
            ids = range(at, at + size)
            at, frames = at + size, frames + 1
            payload = b"".join(EVENTS[token] for token in ids) if sent.fields["stream"] else b""
            if at == TOKENS:
                payload = payload + END if sent.fields["stream"] else b"".join(EVENTS)
            yield (payload, size, packed(*ids)) if self.told else (payload, size)
            if at == TOKENS:
                if self.cuts:  # lost after its last frame
                    raise LOST
                return


WHOLE = b"".join(EVENTS)


@given(
    st.integers(0, TOKENS), st.lists(st.integers(1, 4), min_size=1, max_size=3), st.booleans(), st.booleans()
)
async def test_an_answer_goes_on_wherever_its_engine_is_lost(
    cut: int, sizes: list[int], stream: bool, dies: bool
) -> None:
    pipeline = Pipeline(decode=Engines((cut, LOST if dies else refusal(500)), sizes=sizes))
    answer = await pipeline.run(stream=stream)
    assert answer == (WHOLE + END if stream else WHOLE)
    first, *rest = pipeline.decode.requests
    for second in rest:
        assert second.replica != first.replica
        assert second.header["id"] == first.header["id"]  # which the client sees
        assert second.header["token_ids"] == first.header["token_ids"] == TOKEN_IDS
        assert pipeline.prefill.requests[-1].header["generated"] == second.header["generated"]
    assert pipeline.client.tokens[-1] == TOKENS
    went_on = rest and rest[0].header["generated"]
    assert ("resumed" in pipeline.client.events) == bool(went_on)


async def test_a_stream_goes_on_once() -> None:
    pipeline = Pipeline(decode=Engines((3, LOST), (2, LOST)), decode_tries=9)
    answer = await pipeline.run(stream=True)
    assert answer.startswith(b"".join(EVENTS[:5]) + b'data: {"error"')
    assert b'"engine_lost"' in answer
    assert len(pipeline.decode.requests) == 2
    assert pipeline.client.events[-1] == "streams_lost"


async def test_a_second_engine_that_fails_before_a_token_is_not_the_last_one() -> None:
    pipeline = Pipeline(decode=Engines((3, LOST), (0, LOST)))
    assert await pipeline.run(stream=True) == WHOLE + END
    assert [sent.replica for sent in pipeline.decode.requests] == ["d0", "d1", "d2"]


async def test_a_whole_answer_goes_on_as_long_as_there_are_tries() -> None:
    pipeline = Pipeline(decode=Engines((3, LOST), (2, LOST)))
    assert await pipeline.run(stream=False) == WHOLE
    assert pipeline.decode.requests[-1].header["generated"] == packed(*range(5))


async def test_without_ids_a_stream_ends_and_a_whole_answer_starts_again() -> None:
    lost = await Pipeline(decode=Engines((3, LOST), told=False)).run(stream=True)
    assert lost.startswith(b"".join(EVENTS[:3]) + b'data: {"error"')
    pipeline = Pipeline(decode=Engines((3, LOST), told=False))
    assert await pipeline.run(stream=False) == WHOLE
    assert pipeline.decode.requests[-1].header["generated"] == b""


@pytest.mark.parametrize("stream", [True, False])
async def test_what_is_lost_after_an_answers_end_is_nothing(stream: bool) -> None:
    pipeline = Pipeline(decode=Engines((None, None), (None, None)))
    assert await pipeline.run(stream=stream) == (WHOLE + END if stream else WHOLE)
    assert len(pipeline.decode.requests) == 1


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("failure", [refusal(400), refusal(503), LOST])
async def test_an_answer_that_no_engine_prefills_again_goes_on_whole(
    failure: Exception, stream: bool
) -> None:
    """A prefill engine may hold less than a prompt and what was generated from it."""
    answers = iter([answer_with(prefill_result()), answer_with(failure)])
    pipeline = Pipeline(prefill=lambda sent: next(answers)(sent), decode=Engines((3, LOST)))
    assert await pipeline.run(stream=stream) == (WHOLE + END if stream else WHOLE)
    second = pipeline.decode.requests[-1].header
    assert (second["kv"], second["generated"]) == ({}, packed(0, 1, 2))
    assert second["token_ids"] == TOKEN_IDS
    assert pipeline.client.events == ["prefills", "whole_without_prefill", "resumed"]


async def test_an_answer_that_finds_no_room_in_prefill_goes_on_whole() -> None:
    full = {KV_USAGE: 1.0, SAMPLE: 0}
    pipeline = Pipeline(decode=Engines((3, LOST)), prefill_wait_s=0.0)
    budget = pipeline.prefill.directory.budget = PrefillBudget(0.9)

    async def decode(sent: Any) -> AsyncIterator[Any]:
        budget.take({"p0": full, "p1": full})
        async for chunk in engines(sent):
            yield chunk

    engines, pipeline.decode.answer = pipeline.decode.answer, decode
    assert await pipeline.run(stream=True) == WHOLE + END
    assert pipeline.client.events == ["prefills", "whole_without_prefill", "resumed"]


async def test_a_stream_that_no_engine_takes_again_ends_with_an_error() -> None:
    pipeline = Pipeline(decode=Engines((3, LOST), *[(0, refusal(400))] * 9))
    answer = await pipeline.run(stream=True)
    assert answer.startswith(b"".join(EVENTS[:3]) + b'data: {"error"')


async def test_a_few_answers_at_once_are_prefilled_again() -> None:
    go_on = asyncio.Event()
    first = asyncio.Event()

    async def prefill(sent: Any) -> AsyncIterator[Any]:
        if sent.header["generated"]:
            first.set()
            await go_on.wait()
        yield prefill_result()

    pipeline = Pipeline(
        prefill=prefill, decode=Engines((3, LOST), (3, LOST)), retries_at_once=1, retry_wait_s=0.05
    )
    answers = [asyncio.create_task(_all(pipeline)) for _ in range(2)]
    await first.wait()
    done, _ = await asyncio.wait(answers, return_when=asyncio.FIRST_COMPLETED, timeout=20)
    go_on.set()
    assert b'"engine_lost"' in done.pop().result()
    assert WHOLE + END in await asyncio.gather(*answers)


async def _all(pipeline: Pipeline) -> bytes:
    return b"".join([chunk async for chunk in pipeline.path.generate(request_context(stream=True))])


async def test_a_whole_answer_that_may_not_go_on_in_time_is_to_be_sent_again() -> None:
    pipeline = Pipeline(decode=Engines((3, LOST)), retry_wait_s=0.0)
    pipeline.path._retries._turns = asyncio.Semaphore(0)
    with pytest.raises(Overloaded, match="too many requests have lost their engine"):
        await pipeline.run(stream=False)


async def test_a_request_whose_engine_was_not_lost_is_not_told_that_it_was() -> None:
    pipeline = Pipeline(decode=Engines((3, refusal(500))), retry_wait_s=0.0)
    pipeline.path._retries._turns = asyncio.Semaphore(0)
    with pytest.raises(Overloaded, match="are tried again after a call to an engine has failed"):
        await pipeline.run(stream=False)


def taken(rate: Rate) -> bool:
    """Whether it may be done at once."""
    return rate.reserve(0.0) is not None


def test_a_rate_bounds_what_is_done_in_any_second() -> None:
    now = [0.0]
    rate = Rate(2.0, clock=lambda: now[0])
    assert [taken(rate) for _ in range(3)] == [True, True, False]
    now[0] += 0.5
    assert [taken(rate) for _ in range(2)] == [True, False]
    now[0] += 60.0
    assert [taken(rate) for _ in range(3)] == [True, True, False]
    assert not taken(Rate(0.0))


def test_what_is_reserved_comes_one_after_the_other() -> None:
    rate = Rate(2.0, clock=lambda: 0.0)
    assert [rate.reserve(1.0) for _ in range(5)] == [0.0, 0.0, 0.5, 1.0, None]
    rate.give_back()
    assert [rate.reserve(1.0), rate.reserve(1.0)] == [1.0, None]
    assert not taken(rate)
    assert Rate(0.0).reserve(1e9) is None
