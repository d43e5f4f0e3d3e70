"""The path of one request over fake engines: retries, placement after failure, releases."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError
from ray.exceptions import ActorUnavailableError, RayActorError, RayError

from eldr_serve.routing import Placement, PlacementRequest, State
from eldr_serve.serving.budget import KV_USAGE, SAMPLE, PrefillBudget
from eldr_serve.serving.compat import ChatCompletionRequest, CompletionRequest, ErrorResponse
from eldr_serve.serving.errors import Overloaded
from eldr_serve.serving.path import PathOptions, RequestPath
from eldr_serve.serving.replicas import Engines, ReplicaDirectory
from eldr_serve.serving.wire import (
    ATTEMPT,
    REPLICA,
    SIGNATURE,
    needs_whole_engine,
    prefill_request,
    prompt_key,
)
from eldr_serve.signature import pack_counts

COUNTS = np.arange(12, dtype=np.uint32).reshape(3, 4)


class Stream:
    """A DeploymentResponseGenerator: an async iterator that can be cancelled."""

    def __init__(self, chunks: AsyncIterator[Any]) -> None:
        self._chunks = chunks
        self.cancelled = False

    def __aiter__(self) -> Stream:
        return self

    async def __anext__(self) -> Any:
        return await anext(self._chunks)

    def cancel(self) -> None:
        self.cancelled = True


class Deployment:
    """A DeploymentHandle whose every call is answered by `answer(request)`, an async generator."""

    def __init__(self, answer: Callable[[Any], AsyncIterator[Any]]) -> None:
        self._answer = answer
        self.requests: list[Any] = []
        self.streams: list[Stream] = []
        self.released: list[Any] = []

    def options(self, **_: Any) -> Deployment:
        return self

    def __getattr__(self, name: str) -> Any:
        return self

    def remote(self, request: Any, raw_info: Any = None) -> Any:
        if not hasattr(request, "max_tokens"):
            self.released.append(request)
            done: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
            done.set_result(True)
            return done
        self.requests.append(request)
        self.streams.append(Stream(self._answer(request)))
        return self.streams[-1]


class Usage:
    prompt_tokens = 7


class PrefillAnswer:
    usage = Usage()
    kv_transfer_params = {"do_remote_prefill": True, "remote_request_id": "r", SIGNATURE: pack_counts(COUNTS)}  # noqa: RUF012


class Client:
    """A RouterClient that leases the first replica that is not excluded."""

    def __init__(self) -> None:
        self.placed: list[tuple[PlacementRequest, Any]] = []
        self.waits: list[float] = []
        self.held: set[str] = set()
        self.tokens: list[int] = []
        self.counted: list[str] = []
        self.moved: list[str] = []

    async def place(self, request: PlacementRequest, counts: Any, *, wait_s: float) -> Placement:
        self.placed.append((request, counts))
        self.waits.append(wait_s)
        self.held.add(request.request_id)
        replica = next(r for r in ("d0", "d1", "d2") if r not in request.exclude)
        return Placement(request, State.LEASED, replica=replica)

    def release(self, request_id: str) -> None:
        self.held.discard(request_id)

    def progress(self, request_id: str, tokens: int) -> None:
        assert request_id in self.held
        self.tokens.append(tokens)

    def served_by(self, request_id: str, replica: str) -> None:
        self.moved.append(replica)

    def count(self, event: str) -> None:
        self.counted.append(event)


def error(code: int) -> ErrorResponse:
    return ErrorResponse(error={"message": "no", "type": "test", "code": code})


async def good_prefill(request: Any) -> AsyncIterator[Any]:
    yield PrefillAnswer()


async def good_decode(request: Any) -> AsyncIterator[Any]:
    for text in ("a", "b", "c"):
        yield f"data: {text}"


class World:
    def __init__(self, prefill: Any = good_prefill, decode: Any = good_decode, **options: Any) -> None:
        self.prefill, self.decode, self.client = Deployment(prefill), Deployment(decode), Client()
        self.prefills = ReplicaDirectory()
        engines = Engines(self.prefill, self.decode, self.prefills, ReplicaDirectory())  # type: ignore[arg-type]
        self.path = RequestPath(
            engines=engines,
            client=self.client,  # type: ignore[arg-type]
            options=PathOptions(**({"retry_backoff_s": 0.0} | options)),
        )

    async def run(self, **fields: Any) -> list[Any]:
        request = CompletionRequest(model="m", prompt="hello", **({"max_tokens": 5} | fields))
        found = [chunk async for chunk in self.path.generate(request, "completions")]
        await asyncio.sleep(0)
        return found


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
    assert not world.client.held
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


async def test_a_prefill_without_signature_is_placed_all_the_same() -> None:
    class Bare(PrefillAnswer):
        kv_transfer_params = {"do_remote_prefill": True}  # noqa: RUF012

    async def bare(request: Any) -> AsyncIterator[Any]:
        yield Bare()

    world = World(prefill=bare)
    assert len(await world.run()) == 3
    assert world.client.placed[0][1] is None


async def test_a_malformed_signature_is_no_signature() -> None:
    class Malformed(PrefillAnswer):
        kv_transfer_params = {SIGNATURE: "AAAA"}  # noqa: RUF012

    async def malformed(request: Any) -> AsyncIterator[Any]:
        yield Malformed()

    world = World(prefill=malformed)
    assert len(await world.run()) == 3
    assert world.client.placed[0][1] is None


async def test_a_failing_prefill_is_tried_on_the_next_replica_in_rank() -> None:
    async def second_works(request: Any) -> AsyncIterator[Any]:
        if request.kv_transfer_params[ATTEMPT] == 0:
            raise RayActorError
        yield PrefillAnswer()

    world = World(prefill=second_works)
    assert len(await world.run()) == 3
    assert [r.kv_transfer_params[ATTEMPT] for r in world.prefill.requests] == [0, 1]
    assert len({r.request_id for r in world.prefill.requests}) == 2
    assert world.client.counted.count("prefill_retries") == 1


async def test_when_no_prefill_works_the_client_is_told_to_come_again() -> None:
    async def busy(request: Any) -> AsyncIterator[Any]:
        yield error(503)

    world = World(prefill=busy, prefill_tries=2)
    with pytest.raises(Overloaded) as refusal:
        await world.run()
    assert refusal.value.retry_after_s >= 1
    assert len(world.prefill.requests) == 2
    assert not world.client.placed


async def test_a_request_that_is_wrong_is_not_tried_again() -> None:
    async def wrong(request: Any) -> AsyncIterator[Any]:
        yield error(400)

    world = World(prefill=wrong)
    (answer,) = await world.run()
    assert answer.error.code == 400
    assert len(world.prefill.requests) == 1
    assert not world.decode.requests


@pytest.mark.parametrize(("failure", "passed_over"), [("dies", 0), ("refuses", 1), ("error-event", 1)])
async def test_a_decode_that_fails_before_its_first_token_is_prefilled_again_and_placed_elsewhere(
    failure: str, passed_over: int
) -> None:
    async def first_fails(request: Any) -> AsyncIterator[Any]:
        if request.kv_transfer_params[REPLICA] == "d0":
            if failure == "dies":
                raise RayActorError
            yield error(500) if failure == "refuses" else 'data: {"error": {"code": 500}}'
            return
        yield "data: a"

    world = World(decode=first_fails)
    assert await world.run() == ["data: a"]
    assert world.client.placed[1][0].exclude == ("d0",)
    first, second = world.prefill.requests
    assert first.request_id != second.request_id
    # By its prefix cache the engine of the first prefill makes the second one cheap. But if a decode engine
    # lives and cannot serve, it may be the blocks that it could not read.
    assert [r.kv_transfer_params[ATTEMPT] for r in (first, second)] == [0, passed_over]
    assert not world.client.held


async def test_when_no_decode_works_the_blocks_of_every_prefill_are_released() -> None:
    async def dead(request: Any) -> AsyncIterator[Any]:
        raise RayActorError
        yield

    world = World(decode=dead, decode_tries=2)
    world.prefills.take_routed = lambda request_id: "p0"  # type: ignore[method-assign]
    with pytest.raises(Overloaded):
        await world.run()
    await asyncio.sleep(0.01)
    assert [r.kv_transfer_params for r in world.prefill.released] == [{REPLICA: "p0"}] * 2
    assert {r.request_id for r in world.prefill.released} == {r.request_id for r in world.prefill.requests}
    assert not world.client.held


@pytest.mark.parametrize("leg", ["prefill", "decode"])
async def test_after_the_last_try_nobody_waits(leg: str) -> None:
    async def dead(request: Any) -> AsyncIterator[Any]:
        raise RayActorError
        yield

    world = World(**{leg: dead}, prefill_tries=1, decode_tries=1, retry_backoff_s=60.0)
    async with asyncio.timeout(10):
        with pytest.raises(Overloaded):
            await world.run()


async def test_prefill_tries_are_of_the_whole_request() -> None:
    async def every_other_fails(request: Any) -> AsyncIterator[Any]:
        if len(world.prefill.requests) % 2:
            raise RayActorError
        yield PrefillAnswer()

    async def dead(request: Any) -> AsyncIterator[Any]:
        raise RayActorError
        yield

    world = World(prefill=every_other_fails, decode=dead, prefill_tries=3, decode_tries=9)
    with pytest.raises(Overloaded, match="3 prefill attempts failed"):
        await world.run()
    assert len(world.prefill.requests) == 5


@pytest.mark.parametrize(
    ("failure", "released"), [(RayActorError(), True), (ActorUnavailableError("away", None), False)]
)
async def test_blocks_that_an_engine_may_still_read_are_left_to_their_lease(
    failure: RayError, released: bool
) -> None:
    async def first_fails(request: Any) -> AsyncIterator[Any]:
        if request.kv_transfer_params[REPLICA] == "d0":
            raise failure
        yield "data: a"

    world = World(decode=first_fails)
    world.prefills.take_routed = lambda request_id: "p0"  # type: ignore[method-assign]
    assert await world.run() == ["data: a"]
    await asyncio.sleep(0.01)
    assert len(world.prefill.released) == released


async def test_a_stream_that_the_engine_refuses_leaves_no_blocks_behind() -> None:
    async def wrong(request: Any) -> AsyncIterator[Any]:
        yield 'data: {"error": {"code": 400}}'

    world = World(decode=wrong)
    world.prefills.take_routed = lambda request_id: "p0"  # type: ignore[method-assign]
    assert len(await world.run()) == 1
    await asyncio.sleep(0.01)
    assert len(world.prefill.released) == 1
    assert len(world.decode.requests) == 1


async def test_a_stream_that_breaks_ends_with_an_error_event() -> None:
    async def breaks(request: Any) -> AsyncIterator[Any]:
        yield "data: a"
        raise RayActorError

    world = World(decode=breaks)
    first, last = await world.run()
    assert first == "data: a"
    assert '"engine_lost"' in last
    assert world.client.counted[-1] == "streams_lost"
    assert not world.client.held


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


async def test_only_a_request_that_has_failed_nowhere_may_wait_for_a_worker() -> None:
    async def first_dies(request: Any) -> AsyncIterator[Any]:
        if request.kv_transfer_params[REPLICA] == "d0":
            raise RayActorError
        yield "data: a"

    world = World(decode=first_dies, queue_ttl_s=7.0)
    await world.run()
    assert world.client.waits == [7.0, 0.0]


async def test_a_request_that_waits_too_long_gives_its_prompts_blocks_back() -> None:
    world = World()
    world.prefills.take_routed = lambda request_id: "p0"  # type: ignore[method-assign]

    async def no_room(*_: Any, **__: Any) -> Placement:
        raise Overloaded("in time")

    world.client.place = no_room  # type: ignore[method-assign]
    with pytest.raises(Overloaded):
        await world.run()
    await asyncio.sleep(0)
    assert [r.kv_transfer_params for r in world.prefill.released] == [{REPLICA: "p0"}]
    assert not world.decode.requests


def test_the_wait_for_a_worker_ends_within_the_lease_of_the_prompts_blocks() -> None:
    assert PathOptions(kv_lease_s=30.0, queue_ttl_s=23.9)
    with pytest.raises(ValidationError, match="queue_ttl_s is 24 s, it must be less than"):
        PathOptions(kv_lease_s=30.0, queue_ttl_s=24.0)


async def test_progress_counts_tokens_not_chunks() -> None:
    async def chat(request: Any) -> AsyncIterator[Any]:
        yield 'data: {"choices":[{"index":0,"delta":{"role":"assistant","content":""}}]}\n\n'
        yield ['data: {"choices":[{"index":0,"delta":{"content":"a"}}]}\n\n'] * 3
        yield 'data: {"choices":[{"index":0,"delta":{"content":"\\"role\\":"}}]}\n\n'
        yield ['data: {"choices":[{"index":0,"text":""}]}\n\n', 'data: {"choices":[],"usage":{}}\n\n']
        yield "data: [DONE]\n\n"

    world = World(decode=chat)
    assert len(await world.run()) == 5
    assert world.client.tokens == [0, 3, 4, 5, 5]


async def test_a_whole_answer_counts_all_its_tokens() -> None:
    class Whole:
        class usage:  # noqa: N801
            completion_tokens = 31

    async def whole(request: Any) -> AsyncIterator[Any]:
        yield Whole()

    world = World(decode=whole)
    await world.run()
    assert world.client.tokens == [31]


def test_equal_prompts_have_equal_keys() -> None:
    def key(prompt: Any, **fields: Any) -> str:
        return prompt_key(CompletionRequest(model="m", prompt=prompt, **fields))

    assert key("a", max_tokens=3) == key("a", max_tokens=4, temperature=1.0)
    assert len({key("a"), key("b"), key([1, 2]), key([1, 3])}) == 4
    said = [ChatCompletionRequest(model="m", messages=[{"role": "user", "content": c}]) for c in "aab"]
    assert prompt_key(said[0]) == prompt_key(said[1]) != prompt_key(said[2])


@pytest.mark.parametrize("leg", ["prefill", "decode"])
async def test_cancelling_cancels_the_leg_and_releases_lease_and_kv(leg: str) -> None:
    reached = asyncio.Event()

    async def hangs(request: Any) -> AsyncIterator[Any]:
        reached.set()
        await asyncio.sleep(60)
        yield "never"

    world = World(**{leg: hangs})
    world.prefills.take_routed = lambda request_id: "p0"  # type: ignore[method-assign]
    task = asyncio.create_task(world.run())
    await reached.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.sleep(0.01)
    assert getattr(world, leg).streams[-1].cancelled
    assert not world.client.held
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
    request = CompletionRequest(**({"model": "m", "prompt": "hello", "max_tokens": 5} | fields))
    assert needs_whole_engine(request) == reason
    world = World()
    [chunk async for chunk in world.path.generate(request, "completions")]
    assert len(world.prefill.requests) == (0 if reason else 1)
    assert set(world.decode.requests[0].kv_transfer_params) >= (
        {REPLICA} if reason else {REPLICA, "do_remote_prefill"}
    )


def test_a_prefill_call_carries_the_whole_request_and_names_its_blocks() -> None:
    chat = ChatCompletionRequest(
        model="m",
        messages=[{"role": "user", "content": "hi"}],
        max_completion_tokens=50,
        stream=True,
        stop="x",
    )
    sent = prefill_request(chat, "id", 1)
    assert (sent.max_completion_tokens, sent.stream, sent.stop) == (50, True, "x")
    assert sent.kv_transfer_params["do_remote_decode"]
    assert sent.kv_transfer_params[ATTEMPT] == 1
    assert sent.request_id == "id"
    assert chat.kv_transfer_params is None
