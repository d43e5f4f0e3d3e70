"""The path over whole engines: the request is sent unchanged, and the engine reports its expert counts."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest
from fake_fleet import Sent, answer_with
from fake_router import wait_until
from request_path import COUNTS, Pipeline, request_context

from eldr_serve.experts.signature import pack_counts
from eldr_serve.pipeline.path import RequestPath
from eldr_serve.replicas import measured_counts
from eldr_serve.router.directory import BLOCK_TOKENS
from eldr_serve.scheduling import prompt_blocks


async def whole_engine(sent: Sent) -> Any:
    """Report the prompt's counts to one call, and generate two tokens for the other."""
    if sent.method == measured_counts.METHOD:
        yield msgspec.msgpack.encode((9, pack_counts(COUNTS)))
        return
    for _ in range(50):  # turns of the event loop
        await asyncio.sleep(0)
    for token in (b"a", b"b"):
        yield token


async def test_a_whole_engine_gets_the_request_unchanged_and_reports_its_counts() -> None:
    pipeline = Pipeline(decode=whole_engine, whole=True)
    assert await pipeline.run(prompt=[5, 6, 7]) == b"ab"
    assert not pipeline.prefill.requests
    ((placed, given),) = pipeline.client.placed
    assert (placed.prompt_tokens, given) == (3, None)
    assert pipeline.client.token_ids[0].tolist() == [5, 6, 7]
    counted, sent = pipeline.decode.requests
    assert (counted.method, sent.method) == (measured_counts.METHOD, "generate")
    assert counted.replica == sent.replica == "d0"
    assert sent.header["id"] == counted.header["id"]
    assert not sent.header["token_ids"]  # the engine applies its own template
    ((name, ids, measured, tokens),) = pipeline.client.counts
    assert name == placed.request_id
    assert (ids.tolist(), tokens) == ([5, 6, 7], 9)
    np.testing.assert_array_equal(measured, COUNTS)


async def test_block_hashes_are_sent_to_the_router_if_decode_engines_prefill() -> None:
    pipeline = Pipeline(decode=whole_engine, whole=True)
    pipeline.decode.directory.publish({"d0": {BLOCK_TOKENS: 2}, "d1": {}})
    ids = list(range(7))

    async def hashes(path: RequestPath = pipeline.path, **fields: Any) -> list[int]:
        context = request_context(prompt=ids, cache_salt=fields.pop("own", None))
        context.request = replace(context.request, **fields)
        async for _ in path.generate(context):
            pass
        blocks = pipeline.client.placed[-1][0].blocks
        assert blocks.block_tokens == 2
        return list(blocks.hashes.tolist())

    plain = await hashes()
    assert plain == prompt_blocks(np.array(ids, np.uint32), 2).hashes.tolist()
    assert len(plain) == 3
    of_tenant, of_user = await hashes(cache_salt="tenant"), await hashes(own="user")
    assert len({*plain, *of_tenant, *of_user}) == 9
    assert await hashes(cache_salt="tenant", own="user") == of_tenant  # the tenant's salt includes the user's
    await pipeline.run(prompt=["a", "b"], n=2)
    assert pipeline.client.placed[-1][0].blocks is None  # the token ids are unknown
    split = Pipeline()
    split.decode.directory.publish({"d0": {BLOCK_TOKENS: 2}})
    await split.run(prompt=ids)
    assert split.client.placed[-1][0].blocks is None  # another engine prefills


async def test_a_prompt_without_token_ids_is_placed_by_load() -> None:
    pipeline = Pipeline(decode=whole_engine, whole=True)
    assert await pipeline.run(prompt=["a", "b"], n=2) == b"ab"
    (sent,) = pipeline.decode.requests
    assert (sent.method, sent.kv) == ("generate", {})
    assert pipeline.client.placed[0][0].prompt_tokens == 0


async def test_requests_succeed_without_measured_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measured_counts, "_LATER_S", 0.001)

    async def silent(sent: Sent) -> Any:
        if sent.method == measured_counts.METHOD:
            await asyncio.sleep(60)
        elif sent.replica == "d0":
            raise RuntimeError("no memory")
        yield b"x"

    pipeline = Pipeline(decode=silent, whole=True)
    assert await pipeline.run(prompt=[5]) == b"x"
    assert [sent.replica for sent in pipeline.decode.requests] == ["d0", "d0", "d1", "d1"]
    assert not pipeline.client.counts
    await wait_until(lambda: not any(pipeline.decode.in_flight.values()))  # no call waits any more


async def test_a_disconnected_client_leaves_no_call_or_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measured_counts, "_LATER_S", 0.001)
    pipeline = Pipeline(decode=answer_with(b"a", asyncio.Event()), whole=True)
    stream = pipeline.path.generate(request_context(prompt=[1, 2]))
    await anext(stream)
    await stream.aclose()
    await wait_until(lambda: not any(pipeline.decode.in_flight.values()))
    assert not pipeline.client.leases
