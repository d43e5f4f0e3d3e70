"""The path of one request over fake engines: retries, placement after a failure, releases."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from pydantic import ValidationError

from eldr_serve.channel import CallFailedError, ChannelLostError, SlowReaderError
from eldr_serve.engine.calls import EXPERT_COUNTS_KEY
from eldr_serve.engine.report_fields import KV_USAGE, QUEUE, REPORT_NUMBER
from eldr_serve.errors import EnginesLostError, OverloadedError
from eldr_serve.fleet.directory import ReplicaDirectory
from eldr_serve.fleet.fleet import Fleet
from eldr_serve.fleet.kv_usage import KvUsage
from eldr_serve.pipeline.context.stage_latencies import WINDOW, StageLatencies
from eldr_serve.pipeline.path_options import PathOptions
from eldr_serve.pipeline.prefill import kv_release
from eldr_serve.request import RequestFields, num_sequences, prompt_head, prompt_key, why_not_split
from tests.support.fake_fleet import TOKEN_IDS, answer_with, in_turn, prefill_result, refusal
from tests.support.fake_router import wait_until
from tests.support.request_path import (
    COUNTS,
    Pipeline,
    good_decode,
    good_prefill,
    on,
    on_virtual_time,
    request_context,
)

DEAD = answer_with(ChannelLostError("it is dead"))


@pytest.fixture(autouse=True)
def without_notice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip the wait for a notice: the fake decode engines read no blocks."""
    monkeypatch.setattr(kv_release, "_NOTICE_S", 0.0)


async def test_a_request_is_prefilled_placed_and_decoded() -> None:
    pipeline = Pipeline()
    assert await pipeline.run() == b"abc"
    ((placement, counts),) = pipeline.router.placements
    np.testing.assert_array_equal(counts, COUNTS)
    assert placement.prompt_tokens == 7
    (prefill,), (decode,) = pipeline.prefill.requests, pipeline.decode.requests
    assert (prefill.method, decode.method, decode.replica) == ("prefill", "generate", "d0")
    assert decode.kv["do_remote_prefill"]
    assert EXPERT_COUNTS_KEY not in decode.kv
    assert decode.header["token_ids"] == TOKEN_IDS  # the prompt is tokenised once
    assert prefill.body == decode.body
    assert not pipeline.prefill.released
    assert set(pipeline.services.stage_latencies.summary()) == {"prefill", "place", "first_token", "handover"}


@pytest.mark.parametrize(("fields", "timed"), [({}, True), ({"n": 2}, False)])
async def test_the_handover_of_a_split_request_is_timed(fields: dict[str, int], timed: bool) -> None:
    async def slow_decode(sent: Any) -> AsyncIterator[Any]:
        await asyncio.sleep(0.05)
        async for chunk in good_decode(sent):
            yield chunk

    context = request_context(**fields)
    stream = Pipeline(decode=slow_decode).path.generate(context)
    assert b"".join([chunk async for chunk in stream]) == b"abc"
    assert (context.record.handover_s is not None) == timed
    assert not timed or 0.05 <= context.record.handover_s < 1


@pytest.mark.parametrize("params", [{"do_remote_prefill": True}, {EXPERT_COUNTS_KEY: "AAAA"}])
async def test_a_prefill_without_valid_expert_counts_is_placed_without_them(params: dict[str, Any]) -> None:
    pipeline = Pipeline(prefill=answer_with(prefill_result(**params)))
    assert await pipeline.run() == b"abc"
    assert pipeline.router.placements[0][1] is None


async def test_the_calls_of_other_ingresses_count_in_the_load_of_a_prefill_replica() -> None:
    pipeline = Pipeline()
    await pipeline.run()
    hashed = pipeline.prefill.requests[0].replica
    reports = {
        name: {QUEUE: {"number": 0, "num_ingresses": 2, "calls": 9 if name == hashed else 0}}
        for name in pipeline.prefill.live_workers
    }
    pipeline.prefill.directory.update_reports(reports)
    await pipeline.run()
    assert pipeline.prefill.requests[1].replica != hashed


async def test_a_failed_prefill_is_retried_on_the_next_replica() -> None:
    pipeline = Pipeline(prefill=in_turn(DEAD, answer_with(prefill_result())))
    assert await pipeline.run() == b"abc"
    first, second = pipeline.prefill.requests
    assert first.replica != second.replica
    assert first.header["id"] != second.header["id"]
    assert pipeline.counters.events.count("prefill_retries") == 1


async def test_a_request_is_refused_with_a_retry_time_if_all_prefills_fail() -> None:
    pipeline = Pipeline(prefill=answer_with(refusal(503)), prefill_attempts=2)
    with pytest.raises(OverloadedError) as refused:
        await pipeline.run()
    assert refused.value.retry_after_s >= 1
    assert len(pipeline.prefill.requests) == 2
    assert not pipeline.router.placements


@pytest.mark.parametrize("leg", ["prefill", "decode"])
async def test_an_invalid_request_is_not_retried(leg: str) -> None:
    pipeline = Pipeline(**{leg: answer_with(refusal(400, "wrong"))})
    with pytest.raises(CallFailedError, match="wrong") as refused:
        await pipeline.run()
    assert refused.value.status == 400
    assert len(pipeline.prefill.requests) == 1
    assert len(pipeline.decode.requests) == (leg == "decode")
    await wait_until(lambda: len(pipeline.prefill.released) == len(pipeline.decode.requests))


@pytest.mark.parametrize(
    ("failure", "suspects_prefill", "released"),
    [
        # The engine may still read the blocks, until their KV lease ends.
        (ChannelLostError("away"), False, 0),
        (refusal(500), True, 1),
        (refusal(503), False, 1),
    ],
    ids=["lost", "fails", "full"],
)
async def test_decode_failures_before_a_token_cause_a_second_prefill_elsewhere(
    failure: Any, suspects_prefill: bool, released: int
) -> None:
    pipeline = Pipeline(decode=on("d0", answer_with(failure)), queue_timeout_s=7.0)
    assert await pipeline.run() == b"abc"
    assert pipeline.router.placements[1][0].exclude == ("d0",)
    assert pipeline.router.waits == [7.0, 0.0]  # a retry does not wait
    first, second = pipeline.prefill.requests
    assert first.header["id"] != second.header["id"]
    # The prefix cache makes a second prefill on the same engine cheap. But if the decode engine lives and
    # cannot serve, perhaps it could not read the blocks of that engine.
    assert (first.replica != second.replica) == suspects_prefill
    await wait_until(lambda: len(pipeline.prefill.released) == released)


async def test_blocks_are_released_at_once_if_the_decode_replica_has_no_channel() -> None:
    pipeline = Pipeline()
    pipeline.decode.lost = {"d0"}
    assert await pipeline.run() == b"abc"
    first, _ = pipeline.prefill.requests
    assert pipeline.prefill.released == [(first.replica, first.header["id"])]


async def test_the_blocks_of_each_prefill_are_released_if_all_decodes_fail() -> None:
    pipeline = Pipeline(decode=answer_with(refusal(500)), decode_attempts=2)
    with pytest.raises(OverloadedError):
        await pipeline.run()
    await wait_until(lambda: len(pipeline.prefill.released) == 2)
    calls = pipeline.prefill.requests
    assert pipeline.prefill.released == [(call.replica, call.header["id"]) for call in calls]


@pytest.mark.parametrize("leg", ["prefill", "decode"])
async def test_there_is_no_backoff_after_the_last_attempt(leg: str) -> None:
    pipeline = Pipeline(**{leg: DEAD}, prefill_attempts=1, decode_attempts=1, retry_backoff_s=60.0)
    async with asyncio.timeout(10):
        with pytest.raises(OverloadedError):
            await pipeline.run()


async def test_prefill_attempts_are_counted_over_the_whole_request() -> None:
    prefill = in_turn(*[DEAD, answer_with(prefill_result())] * 9)
    attempts: dict[str, Any] = {"prefill_attempts": 3, "decode_attempts": 9}
    pipeline = Pipeline(prefill=prefill, decode=DEAD, **attempts, max_lost_engines=9)
    with pytest.raises(
        OverloadedError,
        match="3 prefill and 2 decode attempts of this request failed; the last failure: prefill replica",
    ):
        await pipeline.run()
    assert len(pipeline.prefill.requests) == 5


@pytest.mark.parametrize(
    ("prefill", "calls"),
    [(DEAD, (3, 0)), (answer_with(prefill_result()), (3, 3)), (in_turn(DEAD, good_prefill, DEAD), (3, 1))],
    ids=["prefill", "decode", "both"],
)
async def test_a_request_that_has_lost_three_engines_is_refused(prefill: Any, calls: tuple[int, int]) -> None:
    pipeline = Pipeline(prefill=prefill, decode=DEAD, prefill_attempts=9, decode_attempts=9)
    with pytest.raises(EnginesLostError, match="3 engines were lost while they worked on this request"):
        await pipeline.run()
    assert (len(pipeline.prefill.requests), len(pipeline.decode.requests)) == calls
    assert pipeline.counters.events[-1] == "refused_lost_engines"


async def test_only_engines_that_end_with_the_request_count_as_lost_by_it() -> None:
    silent = answer_with(ChannelLostError("it is silent", silent=True))
    prefill = in_turn(silent, good_prefill, good_prefill, good_prefill)
    pipeline = Pipeline(prefill=prefill, decode=on("d1", DEAD), max_lost_engines=2)
    pipeline.decode.lost = {"d0"}
    assert await pipeline.run() == b"abc"
    assert [request.exclude for request, _ in pipeline.router.placements] == [(), ("d0",), ("d0", "d1")]


@pytest.mark.parametrize(
    ("end", "why"),
    [
        (ChannelLostError("gone"), b"decode worker d0 failed: gone; send the request again"),
        (refusal(500, "out of memory"), b"decode worker d0 failed: out of memory; send"),
        (asyncio.Event(), b"decode worker d0 failed: the engine sent nothing more for 0.1 s; send"),
    ],
    ids=["lost", "fails", "late"],
)
async def test_a_lost_stream_ends_with_an_error_event_that_says_why(end: Any, why: bytes) -> None:
    pipeline = Pipeline(decode=answer_with(b"a", end), next_token_timeout_s=0.1)
    answer = await pipeline.run(stream=True)
    assert answer.startswith(b"adata: ")
    assert b'"engine_lost"' in answer
    assert why in answer
    assert answer.endswith(b"data: [DONE]\n\n")
    assert pipeline.counters.events[-1] == "streams_lost"


async def test_a_client_that_does_not_read_loses_its_stream() -> None:
    more = asyncio.Event()
    pipeline = Pipeline(decode=answer_with(b"x", more, *[b"x" * 2**18] * 9, asyncio.Event()))
    stream = pipeline.path.generate(request_context())
    assert await anext(stream) == b"x"
    more.set()
    (sent,) = pipeline.decode.requests
    await wait_until(lambda: sent.cancelled)
    with pytest.raises(SlowReaderError):
        await anext(stream)
    assert not pipeline.router.leases


async def test_the_release_says_whether_the_answer_is_complete() -> None:
    pipeline = Pipeline(decode=on("d0", DEAD))
    assert await pipeline.run() == b"abc"
    assert pipeline.router.releases == [False, True]
    pipeline = Pipeline(decode=answer_with(b"a", asyncio.Event()))
    stream = pipeline.path.generate(request_context(stream=True))
    assert await anext(stream) == b"a"
    await stream.aclose()  # this happens when the client has gone
    assert pipeline.router.releases == [False]


async def test_a_request_waits_for_a_prefill_replica_with_room_and_is_then_refused() -> None:
    full = {KV_USAGE: 1.0, REPORT_NUMBER: 0}
    pipeline = Pipeline(replica_wait_s=0.2)
    kv_usage = pipeline.prefill.directory.kv_usage = KvUsage(0.9)
    kv_usage.update({"p0": full, "p1": full})
    with pytest.raises(OverloadedError, match="are full"):
        await pipeline.run()
    assert not pipeline.prefill.requests
    assert pipeline.counters.events == ["refused_prefill_full"]
    waiting = asyncio.create_task(pipeline.run())
    await asyncio.sleep(0.06)
    kv_usage.update({"p0": full, "p1": full | {KV_USAGE: 0.5, REPORT_NUMBER: 1}})
    assert await waiting == b"abc"
    assert [sent.replica for sent in pipeline.prefill.requests] == ["p1"]


async def test_a_request_is_refused_without_a_prefill_replica() -> None:
    pipeline = Pipeline(replica_wait_s=0.05, prefilled_by_decode_per_s=0.0)
    pipeline.prefill.lost = {"p0", "p1"}
    with pytest.raises(OverloadedError, match="no prefill replica can be reached"):
        await pipeline.run()


async def test_a_request_waits_for_the_first_decode_replica() -> None:
    """An ingress has just started, or all decode replicas are being replaced."""
    pipeline = Pipeline(replica_wait_s=60.0)
    pipeline.decode.lost = {"d0", "d1", "d2"}
    answer = asyncio.create_task(pipeline.run())
    await asyncio.sleep(0.1)
    assert not pipeline.prefill.requests
    pipeline.decode.lost = {"d1", "d2"}
    assert await answer == b"abc"


@pytest.mark.parametrize("change", [Fleet._update, Fleet._sample_reports])
async def test_channels_and_reports_wake_waiting_requests(change: Callable[[Fleet], None]) -> None:
    fleet, loop = Fleet(ReplicaDirectory()), asyncio.get_running_loop()
    with fleet.waiters.take_turn() as turn:
        loop.call_soon(change, fleet)
        async with asyncio.timeout(0.5):
            await turn.wait_until(loop.time() + 60.0)


@pytest.mark.parametrize("dies", [False, True], ids=["away", "dies"])
async def test_without_prefill_a_limited_rate_of_requests_is_prefilled_by_decode_engines(dies: bool) -> None:
    async def prefill(sent: Any) -> AsyncIterator[Any]:
        pipeline.prefill.lost = {"p0", "p1"}
        raise ChannelLostError("it is dead")
        yield

    pipeline = Pipeline(prefill=prefill, replica_wait_s=0.0, prefilled_by_decode_per_s=0.001)
    if not dies:
        pipeline.prefill.lost = {"p0", "p1"}
    assert await pipeline.run() == b"abc"
    (decode,) = pipeline.decode.requests
    assert not decode.kv
    assert pipeline.counters.events[-1] == "prefilled_by_decode"
    with pytest.raises(OverloadedError, match="no prefill replica can be reached"):
        await pipeline.run()


def test_requests_prefilled_by_decode_engines_run_in_order_of_arrival() -> None:
    """A cancelled request makes room for the next one."""
    ended: list[int] = []

    async def main() -> None:
        pipeline = Pipeline(replica_wait_s=60.0, prefilled_by_decode_per_s=40.0)
        pipeline.prefill.lost = {"p0", "p1"}

        async def run(number: int) -> None:
            assert await pipeline.run() == b"abc"
            ended.append(number)

        tasks = []
        for number in range(70):  # 40 start at once, the others one after the other
            tasks.append(asyncio.create_task(run(number)))
            await asyncio.sleep(0)
        await asyncio.sleep(0.01)
        for task in tasks[42:60]:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    on_virtual_time(main)
    waited = [number for number in ended if number >= 40]
    assert waited == [40, 41, *range(60, 70)]


async def test_a_request_that_waits_too_long_releases_its_blocks() -> None:
    async def no_room(*_: Any, **__: Any) -> Any:
        raise OverloadedError("in time")

    pipeline = Pipeline()
    pipeline.router.place = no_room
    with pytest.raises(OverloadedError):
        await pipeline.run()
    assert len(pipeline.prefill.released) == 1
    assert not pipeline.decode.requests


def test_the_wait_for_a_worker_is_shorter_than_the_kv_lease() -> None:
    assert PathOptions(kv_lease_s=30.0, queue_timeout_s=23.9)
    with pytest.raises(ValidationError, match=r"queue_timeout_s must be less than .*, got 24 s"):
        PathOptions(kv_lease_s=30.0, queue_timeout_s=24.0)


async def test_progress_counts_tokens_not_chunks() -> None:
    pipeline = Pipeline(decode=answer_with((b"a", 0), (b"b", 3), (b"c", 1), (b"d", 0)))
    assert await pipeline.run() == b"abcd"
    assert pipeline.router.tokens[-1] == 4


@pytest.mark.parametrize("lost", [False, True])
async def test_a_lost_call_is_no_progress_of_its_engine(lost: bool) -> None:
    pipeline = Pipeline(decode=on("d0", DEAD if lost else answer_with(refusal(500))))
    starts = pipeline.services.decode_starts
    starts.leave = leave = Mock(wraps=starts.leave)
    assert await pipeline.run() == b"abc"
    assert leave.call_args_list[0].kwargs == {"answered": not lost}


async def test_an_empty_prefill_answer_is_a_failed_call_and_no_lost_engine() -> None:
    pipeline = Pipeline(prefill=in_turn(answer_with(), good_prefill), max_lost_engines=1)
    assert await pipeline.run() == b"abc"
    assert len(pipeline.prefill.requests) == 2


def test_equal_prompts_have_equal_keys() -> None:
    def key(**fields: Any) -> str:
        return prompt_key(RequestFields(**fields))

    assert key(prompt="a", max_tokens=3) == key(prompt="a", max_tokens=4)
    assert len({key(prompt=prompt) for prompt in ("a", "b", [1, 2], [1, 3])}) == 4
    chats = [key(messages=[{"role": "user", "content": c}]) for c in "aab"]
    assert chats[0] == chats[1] != chats[2]
    assert key(prompt="a\ud800b") == key(prompt="a\ud800b")


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"prompt": 5},
        {"prompt": []},
        {"prompt": ["a"]},
        {"prompt": [1, 2]},
        {"prompt": "a\ud800b"},
        {"messages": 5},
        {"messages": [5]},
        {"messages": [{"role": 5, "content": "\udfff"}]},
    ],
)
def test_prompts_of_any_type_have_a_head(fields: dict[str, Any]) -> None:
    assert isinstance(prompt_head(RequestFields(**fields)), bytes)


async def test_a_cancelled_decode_engine_can_finish_reading_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine may tell the prefill engine that it has read the blocks after its call has ended."""
    monkeypatch.setattr(kv_release, "_NOTICE_S", 0.3)
    pipeline = Pipeline(decode=answer_with(asyncio.Event()))
    task = asyncio.create_task(pipeline.run())
    await wait_until(lambda: pipeline.decode.requests)
    task.cancel()
    await wait_until(lambda: pipeline.decode.requests[-1].running.done())
    await asyncio.sleep(0.1)
    assert not pipeline.prefill.released
    await wait_until(lambda: pipeline.prefill.released)


@pytest.mark.parametrize("leg", ["prefill", "decode"])
async def test_cancellation_cancels_the_call_and_releases_lease_and_blocks(leg: str) -> None:
    pipeline = Pipeline(**{leg: answer_with(asyncio.Event())})
    task = asyncio.create_task(pipeline.run())
    await wait_until(lambda: getattr(pipeline, leg).requests)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert getattr(pipeline, leg).requests[-1].cancelled
    (prefill,) = pipeline.prefill.requests
    await wait_until(lambda: pipeline.prefill.released)
    assert pipeline.prefill.released == [(prefill.replica, prefill.header["id"])]


@pytest.mark.parametrize(
    ("fields", "number"),
    [
        ({"prompt": "a"}, 1),
        ({"prompt": ["a", "b"], "n": 3}, 6),
        ({"prompt_embeds": "AAAA"}, 1),
        ({"prompt_embeds": ["AAAA", "BBBB"]}, 2),
        ({"prompt": "a", "prompt_embeds": ["AAAA"]}, 2),
        ({"messages": []}, 1),
    ],
)
def test_prompts_and_embeddings_are_counted_as_sequences(fields: dict[str, Any], number: int) -> None:
    assert num_sequences(RequestFields(**fields)) == number


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"n": 2}, "n>1"),
        ({"n": "2"}, "n>1"),
        ({"prompt": ["a", "b"]}, "several-prompts"),
        ({"prompt": ["a"]}, "several-prompts"),
        ({"echo": True, "logprobs": 1}, "echo-logprobs"),
        ({"prompt_logprobs": 1}, "prompt-logprobs"),
        ({"echo": True}, None),
        ({"logprobs": 1}, None),
        ({"prompt": [1, 2, 3]}, None),
        ({"stop": ["x"], "stream": True}, None),
    ],
)
async def test_requests_that_cannot_be_split_are_prefilled_by_their_decode_engine(
    fields: dict[str, Any], reason: str | None
) -> None:
    assert why_not_split("completions", request_context(**fields).request.fields) == reason
    pipeline = Pipeline()
    await pipeline.run(**fields)
    assert len(pipeline.prefill.requests) == (reason is None)
    assert ("do_remote_prefill" in pipeline.decode.requests[0].kv) == (reason is None)


def test_percentiles_cover_the_newest_requests_and_counts_cover_all() -> None:
    stages = StageLatencies()
    assert stages.summary() == {}
    for _ in range(10):
        stages.record(place=9.0)
    for _ in range(WINDOW):
        stages.record(place=0.002, handover=0.01)
    summary = stages.summary()
    assert summary["place"]["count"] == WINDOW + 10
    assert summary["place"]["p99_ms"] == pytest.approx(2.0)
    assert summary["handover"]["mean_ms"] == pytest.approx(10.0)
