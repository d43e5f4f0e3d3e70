"""The path of one request over fake engines: retries, placement after failure, releases."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from one_path import COUNTS, World, answering, error, good_decode, prefilled
from pydantic import ValidationError
from ray.exceptions import ActorUnavailableError, RayActorError
from router_talk import settled

from eldr_serve.serving.budget import KV_USAGE, SAMPLE, PrefillBudget
from eldr_serve.serving.compat import ChatCompletionRequest, CompletionRequest
from eldr_serve.serving.errors import Overloaded
from eldr_serve.serving.path import PathOptions
from eldr_serve.serving.stages import WINDOW, Stages
from eldr_serve.serving.wire import (
    ATTEMPT,
    REPLICA,
    SIGNATURE,
    needs_whole_engine,
    prefill_request,
    prompt_key,
)

DEAD = answering(RayActorError())


def attempts(world: World) -> list[int]:
    """How many prefill replicas each call passed over."""
    return [r.kv_transfer_params[ATTEMPT] for r in world.prefill.requests]


def first_on_d0(failure: Any) -> Any:
    """A decode deployment whose replica d0 fails so, and the others answer."""
    d0, others = answering(failure), answering("data: a")
    return lambda request: (d0 if request.kv_transfer_params[REPLICA] == "d0" else others)(request)


async def test_prefill_then_place_then_decode() -> None:
    world = World()
    assert await world.run() == ["data: a", "data: b", "data: c"]
    ((placement, counts),) = world.client.placed
    np.testing.assert_array_equal(counts, COUNTS)
    assert placement.prompt_tokens == 7
    sent = world.decode.requests[0].kv_transfer_params
    assert sent[REPLICA] == "d0"
    assert sent["do_remote_prefill"]
    assert SIGNATURE not in sent
    assert world.prefill.requests[0].kv_transfer_params["do_remote_decode"]
    assert not world.prefill.released
    assert set(world.path.stages.summary()) == {"prefill", "place", "first_chunk", "handover"}


@pytest.mark.parametrize(("fields", "times"), [({}, 1), ({"n": 2}, 0)])
async def test_the_hand_over_is_timed_once_where_there_is_one(fields: dict[str, int], times: int) -> None:
    async def slow_decode(request: Any) -> AsyncIterator[Any]:
        await asyncio.sleep(0.05)
        async for chunk in good_decode(request):
            yield chunk

    told: list[float] = []
    request = CompletionRequest(model="m", prompt="hello", max_tokens=5, **fields)
    stream = World(decode=slow_decode).path.generate(request, "completions", handed_over=told.append)
    assert len([chunk async for chunk in stream]) == 3
    assert len(told) == times
    assert all(0.05 <= seconds < 1 for seconds in told)


@pytest.mark.parametrize("params", [{"do_remote_prefill": True}, {SIGNATURE: "AAAA"}])
async def test_a_prefill_without_a_sound_signature_is_placed_all_the_same(params: dict[str, Any]) -> None:
    world = World(prefill=answering(prefilled(**params)))
    assert len(await world.run()) == 3
    assert world.client.placed[0][1] is None


async def test_a_failing_prefill_is_tried_on_the_next_replica_in_rank() -> None:
    answers = iter([DEAD, answering(prefilled())])
    world = World(prefill=lambda request: next(answers)(request))
    assert len(await world.run()) == 3
    assert attempts(world) == [0, 1]
    assert len({r.request_id for r in world.prefill.requests}) == 2
    assert world.client.counted.count("prefill_retries") == 1


async def test_when_no_prefill_works_the_client_is_told_to_come_again() -> None:
    world = World(prefill=answering(error(503)), prefill_tries=2)
    with pytest.raises(Overloaded) as refusal:
        await world.run()
    assert refusal.value.retry_after_s >= 1
    assert len(world.prefill.requests) == 2
    assert not world.client.placed


async def test_a_request_that_is_wrong_is_not_tried_again() -> None:
    world = World(prefill=answering(error(400)))
    (answer,) = await world.run()
    assert answer.error.code == 400
    assert len(world.prefill.requests) == 1
    assert not world.decode.requests
    streamed = World(decode=answering('data: {"error": {"code": 400}}'))
    assert len(await streamed.run()) == len(streamed.decode.requests) == len(streamed.prefill.released) == 1


@pytest.mark.parametrize(
    ("failure", "passed_over", "released"),
    [
        (RayActorError(), 0, 1),
        (ActorUnavailableError("away", None), 0, 0),  # it may still read the blocks, until their lease ends
        (error(500), 1, 1),
        ('data: {"error": {"code": 500}}', 1, 1),
    ],
    ids=["dies", "away", "refuses", "error-event"],
)
async def test_a_decode_that_fails_before_its_first_token_is_prefilled_again_and_placed_elsewhere(
    failure: Any, passed_over: int, released: int
) -> None:
    world = World(decode=first_on_d0(failure), queue_ttl_s=7.0)
    assert await world.run() == ["data: a"]
    assert world.client.placed[1][0].exclude == ("d0",)
    assert world.client.waits == [7.0, 0.0]  # one that has failed somewhere does not wait
    first, second = world.prefill.requests
    assert first.request_id != second.request_id
    # By its prefix cache the engine of the first prefill makes the second one cheap. But if a decode engine
    # lives and cannot serve, it may be the blocks that it could not read.
    assert attempts(world) == [0, passed_over]
    assert len(world.prefill.released) == released


async def test_when_no_decode_works_the_blocks_of_every_prefill_are_released() -> None:
    world = World(decode=DEAD, decode_tries=2)
    with pytest.raises(Overloaded):
        await world.run()
    assert [r.kv_transfer_params for r in world.prefill.released] == [{REPLICA: "p0"}] * 2
    assert {r.request_id for r in world.prefill.released} == {r.request_id for r in world.prefill.requests}


@pytest.mark.parametrize("leg", ["prefill", "decode"])
async def test_after_the_last_try_nobody_waits(leg: str) -> None:
    world = World(**{leg: DEAD}, prefill_tries=1, decode_tries=1, retry_backoff_s=60.0)
    async with asyncio.timeout(10):
        with pytest.raises(Overloaded):
            await world.run()


async def test_prefill_tries_are_of_the_whole_request() -> None:
    calls = iter(range(99))
    every_other = (DEAD, answering(prefilled()))
    world = World(
        prefill=lambda request: every_other[next(calls) % 2](request),
        decode=DEAD, prefill_tries=3, decode_tries=9,
    )  # fmt: skip
    with pytest.raises(Overloaded, match="3 prefill attempts failed"):
        await world.run()
    assert len(world.prefill.requests) == 5


async def test_a_stream_that_breaks_ends_with_an_error_event() -> None:
    world = World(decode=answering("data: a", RayActorError()))
    first, last = await world.run()
    assert first == "data: a"
    assert '"engine_lost"' in last
    assert world.client.counted[-1] == "streams_lost"


async def test_while_every_prefill_replica_is_full_a_request_waits_and_then_is_told_to_come_again() -> None:
    full = {KV_USAGE: 1.0, SAMPLE: 0}
    world = World(prefill_wait_s=0.2)
    world.prefills.publish(["p0", "p1"])
    world.prefills.budget = PrefillBudget(0.9)
    world.prefills.budget.take({"p0": full, "p1": full})
    with pytest.raises(Overloaded):
        await world.run()
    assert not world.prefill.requests
    assert world.client.counted == ["refused_prefill_full"]
    late = asyncio.create_task(world.run())
    await asyncio.sleep(0.06)
    world.prefills.budget.take({"p0": full, "p1": full | {KV_USAGE: 0.5, SAMPLE: 1}})
    assert len(await late) == 3


async def test_a_request_that_waits_too_long_gives_its_prompts_blocks_back() -> None:
    async def no_room(*_: Any, **__: Any) -> Any:
        raise Overloaded("in time")

    world = World()
    world.client.place = no_room
    with pytest.raises(Overloaded):
        await world.run()
    assert [r.kv_transfer_params for r in world.prefill.released] == [{REPLICA: "p0"}]
    assert not world.decode.requests


def test_the_wait_for_a_worker_ends_within_the_lease_of_the_prompts_blocks() -> None:
    assert PathOptions(kv_lease_s=30.0, queue_ttl_s=23.9)
    with pytest.raises(ValidationError, match="queue_ttl_s is 24 s, it must be less than"):
        PathOptions(kv_lease_s=30.0, queue_ttl_s=24.0)


async def test_progress_counts_tokens_not_chunks() -> None:
    world = World(
        decode=answering(
            'data: {"choices":[{"index":0,"delta":{"role":"assistant","content":""}}]}\n\n',
            ['data: {"choices":[{"index":0,"delta":{"content":"a"}}]}\n\n'] * 3,
            'data: {"choices":[{"index":0,"delta":{"content":"\\"role\\":"}}]}\n\n',
            ['data: {"choices":[{"index":0,"text":""}]}\n\n', 'data: {"choices":[],"usage":{}}\n\n'],
            "data: [DONE]\n\n",
        )
    )
    assert len(await world.run()) == 5
    assert world.client.tokens == [0, 3, 4, 5, 5]
    whole = World(decode=answering(SimpleNamespace(usage=SimpleNamespace(completion_tokens=31))))
    await whole.run()
    assert whole.client.tokens == [31]


def test_equal_prompts_have_equal_keys() -> None:
    def key(prompt: Any, **fields: Any) -> str:
        return prompt_key(CompletionRequest(model="m", prompt=prompt, **fields))

    assert key("a", max_tokens=3) == key("a", max_tokens=4, temperature=1.0)
    assert len({key("a"), key("b"), key([1, 2]), key([1, 3])}) == 4
    said = [ChatCompletionRequest(model="m", messages=[{"role": "user", "content": c}]) for c in "aab"]
    assert prompt_key(said[0]) == prompt_key(said[1]) != prompt_key(said[2])
    odd = CompletionRequest.model_construct(prompt="a\ud800b", messages=None)
    assert prompt_key(odd) == prompt_key(odd)


@pytest.mark.parametrize("leg", ["prefill", "decode"])
async def test_cancelling_cancels_the_leg_and_releases_lease_and_kv(leg: str) -> None:
    world = World(**{leg: answering(asyncio.Event())})
    task = asyncio.create_task(world.run())
    await settled(lambda: getattr(world, leg).requests)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert getattr(world, leg).streams[-1].cancelled
    assert [r.kv_transfer_params for r in world.prefill.released] == [{REPLICA: "p0"}]


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"n": 2}, "n>1"),
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
async def test_what_cannot_be_split_runs_whole_on_a_decode_engine(
    fields: dict[str, Any], reason: str | None
) -> None:
    assert needs_whole_engine(CompletionRequest(**{"model": "m", "prompt": "hello", **fields})) == reason
    world = World()
    await world.run(**fields)
    assert len(world.prefill.requests) == (reason is None)
    sent = world.decode.requests[0].kv_transfer_params
    assert sent.keys() >= {REPLICA} | (set() if reason else {"do_remote_prefill"})


def test_a_prefill_call_carries_the_whole_request_and_names_its_blocks() -> None:
    messages = [{"role": "user", "content": "hi"}]
    chat = ChatCompletionRequest(
        model="m", messages=messages, max_completion_tokens=50, stream=True, stop="x"
    )
    sent = prefill_request(chat, "id", 1)
    assert (sent.max_completion_tokens, sent.stream, sent.stop) == (50, True, "x")
    assert sent.kv_transfer_params["do_remote_decode"]
    assert sent.kv_transfer_params[ATTEMPT] == 1
    assert sent.request_id == "id"
    assert chat.kv_transfer_params is None


def test_percentiles_are_of_the_newest_requests_and_counts_of_all() -> None:
    stages = Stages()
    assert stages.summary() == {}
    for _ in range(10):
        stages.record(place=9.0)
    for _ in range(WINDOW):
        stages.record(place=0.002, handover=0.01)
    found = stages.summary()
    assert found["place"]["count"] == WINDOW + 10
    assert found["place"]["p99_ms"] == pytest.approx(2.0)
    assert found["handover"]["mean_ms"] == pytest.approx(10.0)
