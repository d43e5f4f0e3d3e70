"""What every engine does that serving asks of (`protocol`), over the one that computes nothing."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

import numpy as np
import pytest

from eldr_serve.engine.fake import FakeConfig, FakeEngine, FakeTracer
from eldr_serve.engine.keys import SIGNATURE
from eldr_serve.engine.protocol import Engine, EngineRequest, Prefilled, Sampling, Tracer
from eldr_serve.engine.routes import unpack_routes
from eldr_serve.signature import unpack_counts

CONFIG = FakeConfig(np.arange(24, dtype=np.uint32).reshape(2, 3, 4))


@pytest.fixture
async def engine() -> AsyncIterator[Engine]:
    started = await FakeEngine.start(CONFIG)
    yield started
    await started.stop()


def request(name: str, *, tokens: int = 4, held: Prefilled | None = None) -> EngineRequest:
    body = {"model": "m", "prompt": "the prompt", "max_tokens": tokens, "stream": True, "ignore_eos": True}
    ids = b"" if held is None else held.token_ids.tobytes()
    return EngineRequest("completions", json.dumps(body).encode(), name, kv=held and held.kv, token_ids=ids)


class Sent:
    """What an engine sends, and when the first part has come."""

    def __init__(self) -> None:
        self.parts: list[tuple[bytes, int, bytes]] = []
        self.begun = asyncio.Event()

    def __call__(self, payload: bytes, tokens: int, ids: bytes = b"") -> None:
        self.parts.append((payload, tokens, ids))
        self.begun.set()


async def test_prefill_gives_ids_a_handle_and_counts_of_the_engines_shape(engine: Engine) -> None:
    found = await engine.prefill(request("a"))
    assert found.token_ids.dtype == np.uint32
    assert len(found.token_ids) > 0
    assert unpack_counts(found.kv[SIGNATURE]).shape == await engine.shape()
    await engine.release("a")


@pytest.mark.parametrize("handed_over", [False, True])
async def test_an_answer_is_a_stream_that_ends(engine: Engine, handed_over: bool) -> None:
    held = await engine.prefill(request("a")) if handed_over else None
    sent = Sent()
    await engine.generate(request("a", held=held), sent)
    assert sum(tokens for _, tokens, _ in sent.parts) == 4
    assert sum(len(ids) for *_, ids in sent.parts) == 4 * 4
    assert b"".join(payload for payload, *_ in sent.parts).endswith(b"data: [DONE]\n\n")


async def test_a_call_that_is_cancelled_sends_no_more(engine: Engine) -> None:
    left, other = Sent(), Sent()
    call = asyncio.create_task(engine.generate(request("a", tokens=1000), left))
    await left.begun.wait()
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    seen = len(left.parts)
    await engine.generate(request("b"), other)  # its steps would have been the other's too
    assert len(left.parts) == seen


async def test_a_prompt_may_be_released_twice_and_one_that_was_never_there(engine: Engine) -> None:
    await engine.prefill(request("a"))
    for name in ("a", "a", "never"):
        await engine.release(name)
    await engine.check_health()


async def test_an_engine_says_how_full_it_is(engine: Engine) -> None:
    assert 0 <= engine.kv_usage() <= 1
    block, held = engine.prefix_cache()
    assert 0 <= block <= held or (block, held) == (0, 0)
    assert engine.take_steps().steps >= 0


async def test_a_signature_is_that_of_the_prompt(engine: Engine) -> None:
    tokens, packed = await engine.signature("a")
    assert tokens > 0
    assert unpack_counts(packed).shape == await engine.shape()


@pytest.mark.parametrize("routes", [False, True])
def test_a_tracer_counts_prefill_and_decode_apart(routes: bool) -> None:
    tracer: Tracer = FakeTracer(CONFIG)
    prompts = [tracer.tokenizer.encode(text) for text in ("one", "another")]
    found = tracer.trace(prompts, [Sampling(5, 0.0, ignore_eos=True, routes=routes)] * 2)
    assert [traced["token_ids"] for traced in found] == prompts
    for traced in found:
        decode = unpack_counts(traced["eldr_decode"])
        assert unpack_counts(traced["eldr_prefill"]).shape == decode.shape
        assert traced["eldr_decode_steps"] == 4
        assert (traced["eldr_routes"] is not None) == routes
        if routes:
            taken = unpack_routes(traced["eldr_routes"])
            assert len(taken) == 4
            counted = (taken[..., None] == np.arange(decode.shape[1])).sum(axis=(0, 2))
            np.testing.assert_array_equal(counted, decode)
