"""Expert counts that the engine core sends with an answer become a sample and are not sent to clients."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from msgspec.structs import replace

from eldr_serve.engine.calls import CALIBRATE_KEY
from eldr_serve.engine.protocol import EngineRequest
from eldr_serve.experts.signature import pack_counts
from tests.support.fake_vllm import PROMPT, FakeClient, engine

COUNTS = np.arange(12, dtype=np.uint32).reshape(3, 4)
TOKENS = 6


class Counting(FakeClient):
    """An engine core with our connector, which counts experts on request."""

    counted = 0

    async def generate(self, prompt: Any, params: Any, request_id: str, **more: Any) -> AsyncIterator[Any]:
        calibrates = ((params.extra_args or {}).get("kv_transfer_params") or {}).get(CALIBRATE_KEY)
        self.counted += bool(calibrates)
        async for output in super().generate(prompt, params, request_id, **more):
            if calibrates and output.finished:
                output.kv_transfer_params = {
                    "eldr_prefill": pack_counts(COUNTS),
                    "eldr_decode": pack_counts(COUNTS + 1),
                    "eldr_decode_steps": TOKENS - 1,
                    "eldr_routes": None,
                }
            yield output


async def serve(request: EngineRequest) -> tuple[Counting, bytes, list[Any]]:
    """Serve a request, and return the engine core, the bytes that the client got, and the samples."""
    client = Counting(lambda before: 300 + len(before))
    ours, sent = engine(client, 100), bytearray()
    with patch("time.time", lambda: 100.0):
        await ours.generate(request, lambda payload, *_: sent.extend(payload))
    return client, bytes(sent), ours.take_samples()


def request_of(method: str, **fields: Any) -> EngineRequest:
    """Return a request for TOKENS tokens."""
    prompt = {"messages": [{"role": "user", "content": "hi"}]} if method == "chat" else {"prompt": "hi"}
    body = {"model": "m", "temperature": 0, "max_tokens": TOKENS, "ignore_eos": True, **prompt, **fields}
    return EngineRequest(method, json.dumps(body).encode(), "r", domain="poems")


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("method", ["chat", "completions"])
async def test_an_answer_is_the_same_with_and_without_a_sample(method: str, stream: bool) -> None:
    request = request_of(method, stream=stream)
    plain, expected, none = await serve(request)
    counting, sent, (sample,) = await serve(replace(request, sampled=True))
    assert (plain.counted, counting.counted, none) == (0, 1, [])
    assert sent == expected
    assert (sample.request_id, sample.domain, sample.decode_steps) == ("r", "poems", TOKENS - 1)
    assert sample.token_ids.tolist() == PROMPT
    np.testing.assert_array_equal(sample.prefill_counts, COUNTS)
    np.testing.assert_array_equal(sample.decode_counts, COUNTS + 1)


async def test_the_prefill_engines_counts_have_precedence() -> None:
    signature = pack_counts(COUNTS + 7)
    _, _, (sample,) = await serve(replace(request_of("chat"), sampled=True, expert_counts=signature))
    np.testing.assert_array_equal(sample.prefill_counts, COUNTS + 7)


async def test_several_answers_give_no_sample() -> None:
    client = Counting(lambda before: 300 + len(before))
    ours = engine(client, 100)
    await ours.generate(
        replace(request_of("completions", n=2, temperature=1.0), sampled=True), lambda *_: None
    )
    assert (client.counted, ours.take_samples()) == (0, [])
