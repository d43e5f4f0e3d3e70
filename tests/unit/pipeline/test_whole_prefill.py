"""The path over whole replicas: the request is sent unchanged, and the engine reports its expert counts."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec
import numpy as np
import pytest

from eldr_serve.channel import ChannelLostError
from eldr_serve.engine.methods import WAIT_FOR_COUNTS
from eldr_serve.engine.report_fields import BLOCK_TOKENS
from eldr_serve.errors import OverloadedError
from eldr_serve.experts.signature import pack_counts
from eldr_serve.fleet import measured_counts
from eldr_serve.fleet.outliers import FAILURES
from eldr_serve.pipeline.admission.latency_admission import AdmissionResult
from eldr_serve.pipeline.path import RequestPath
from eldr_serve.pipeline.prefill.prompt_tokenizer import PromptTokenizer
from eldr_serve.queues.throughput import DEFAULT_RATE
from eldr_serve.request import RequestFields, has_exact_ids
from eldr_serve.scheduling.prefixes import prompt_blocks
from tests.support.fake_fleet import Sent, answer_with
from tests.support.fake_router import wait_until
from tests.support.request_path import COUNTS, END, Pipeline, pack_ids, request_context


async def whole_replica(sent: Sent) -> Any:
    """Report the prompt's counts to one call, and generate two tokens for the other."""
    if sent.method == WAIT_FOR_COUNTS:
        yield msgspec.msgpack.encode((9, pack_counts(COUNTS)))
        return
    for _ in range(50):  # iterations of the event loop
        await asyncio.sleep(0)
    for token in (b"a", b"b"):
        yield token


async def test_a_whole_replica_gets_the_request_unchanged_and_reports_its_counts() -> None:
    pipeline = Pipeline(decode=whole_replica, whole=True)
    assert await pipeline.run(prompt=[5, 6, 7]) == b"ab"
    assert not pipeline.prefill.requests
    ((placement, counts),) = pipeline.router.placements
    assert (placement.prompt_tokens, counts) == (3, None)
    assert pipeline.router.token_ids[0].tolist() == [5, 6, 7]
    counted, sent = pipeline.decode.requests
    assert (counted.method, sent.method) == (WAIT_FOR_COUNTS, "generate")
    assert counted.replica == sent.replica == "d0"
    assert sent.header["id"] == counted.header["id"]
    assert not sent.header["token_ids"]  # the engine applies its own template
    ((name, ids, counts, tokens),) = pipeline.router.counts
    assert name == placement.request_id
    assert (ids.tolist(), tokens) == ([5, 6, 7], 9)
    np.testing.assert_array_equal(counts, COUNTS)


async def test_block_hashes_are_sent_to_the_router_if_decode_engines_prefill() -> None:
    pipeline = Pipeline(decode=whole_replica, whole=True)
    pipeline.decode.directory.publish({"d0": {BLOCK_TOKENS: 2}, "d1": {}})
    ids = list(range(7))

    async def hashes(path: RequestPath = pipeline.path, **fields: Any) -> list[int]:
        context = request_context(prompt=ids, cache_salt=fields.pop("own", None))
        context.request = replace(context.request, **fields)
        async for _ in path.generate(context):
            pass
        blocks = pipeline.router.placements[-1][0].blocks
        assert blocks.block_tokens == 2
        return list(blocks.hashes.tolist())

    plain = await hashes()
    assert plain == prompt_blocks(np.array(ids, np.uint32), 2).hashes.tolist()
    assert len(plain) == 3
    of_tenant, of_user = await hashes(cache_salt="tenant"), await hashes(own="user")
    assert len({*plain, *of_tenant, *of_user}) == 9
    assert await hashes(cache_salt="tenant", own="user") == of_tenant  # the tenant's salt includes the user's
    await pipeline.run(prompt=["a", "b"], n=2)
    assert pipeline.router.placements[-1][0].blocks is None  # the token ids are unknown
    split = Pipeline()
    split.decode.directory.publish({"d0": {BLOCK_TOKENS: 2}})
    await split.run(prompt=ids)
    assert split.router.placements[-1][0].blocks is None  # another engine prefills


async def test_predicted_and_measured_cached_tokens_are_counted_together() -> None:
    async def reporting(sent: Sent) -> Any:
        if sent.method != WAIT_FOR_COUNTS:
            yield b"a"
            yield {"cached_tokens": 3.0}

    pipeline = Pipeline(decode=reporting, whole=True)
    pipeline.router.cached_tokens = 2

    await pipeline.run(prompt=["a", "b"], n=2)  # nothing is predicted without token ids
    assert not pipeline.counters.events
    await pipeline.run(prompt=[1, 2, 3, 4])
    events = pipeline.counters.events
    assert sorted(events) == 3 * ["prefix_tokens_measured"] + 2 * ["prefix_tokens_predicted"]


@pytest.mark.parametrize(
    ("method", "fields", "exact"),
    [
        ("completions", {"prompt": [5, 6]}, True),
        ("completions", {"prompt": [5, 6], "add_special_tokens": False}, False),
        ("completions", {"prompt": [5, 6], "truncate_prompt_tokens": 1}, False),
        ("chat", {"prompt": None, "messages": [{"role": "user", "content": "x"}]}, False),
    ],
)
def test_ids_are_exact_if_the_engine_computes_the_same(
    method: str, fields: dict[str, Any], exact: bool
) -> None:
    assert has_exact_ids(request_context(method, **fields).request) == exact


async def test_a_prompt_without_token_ids_is_placed_by_load() -> None:
    pipeline = Pipeline(decode=whole_replica, whole=True)
    assert await pipeline.run(prompt=["a", "b"], n=2) == b"ab"
    (sent,) = pipeline.decode.requests
    assert (sent.method, sent.kv) == ("generate", {})
    assert pipeline.router.placements[0][0].prompt_tokens == 0


async def test_requests_succeed_without_measured_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measured_counts, "_MAX_DELAY_S", 0.001)

    async def silent(sent: Sent) -> Any:
        if sent.method == WAIT_FOR_COUNTS:
            await asyncio.sleep(60)
        elif sent.replica == "d0":
            raise RuntimeError("no memory")
        yield b"x"

    pipeline = Pipeline(decode=silent, whole=True)
    assert await pipeline.run(prompt=[5]) == b"x"
    assert [sent.replica for sent in pipeline.decode.requests] == ["d0", "d0", "d1", "d1"]
    assert not pipeline.router.counts
    await wait_until(lambda: not any(pipeline.decode.open_calls.values()))  # no call waits any more


async def test_a_disconnected_client_leaves_no_call_or_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measured_counts, "_MAX_DELAY_S", 0.001)
    pipeline = Pipeline(decode=answer_with(b"a", asyncio.Event()), whole=True)
    stream = pipeline.path.generate(request_context(prompt=[1, 2]))
    await anext(stream)
    await stream.aclose()
    await wait_until(lambda: not any(pipeline.decode.open_calls.values()))
    assert not pipeline.router.leases


async def test_ejected_engines_have_no_room_for_a_prompt() -> None:
    pipeline = Pipeline(decode=whole_replica, whole=True, prefill_queue_s=1.0)
    admission, outliers = pipeline.services.prefill_admission, pipeline.services.outliers
    for replica in ("d1", "d2"):
        admission.queues.enter(replica, 10 * DEFAULT_RATE, key=replica)
    assert await pipeline.run(prompt=[5]) == b"ab"  # d0 is idle
    for _ in range(FAILURES):
        outliers.record_failure("d0", RuntimeError())
    with pytest.raises(OverloadedError, match="would wait 10 s for its prefill"):
        await pipeline.run(prompt=[5])


async def test_a_prompt_goes_to_no_replica_whose_prefill_queue_is_too_long() -> None:
    pipeline = Pipeline(decode=whole_replica, whole=True, prefill_queue_s=1.0)
    pipeline.services.prefill_admission.queues.enter("d0", 10 * DEFAULT_RATE, key="d0")
    assert await pipeline.run(prompt=[5]) == b"ab"
    assert pipeline.router.placements[0][0].exclude == ("d0",)
    assert {sent.replica for sent in pipeline.decode.requests} == {"d1"}


@pytest.mark.parametrize(
    ("late_workers", "avoided"), [((), ("d0",)), (("d1",), ("d0", "d1")), (("d1", "d2"), ("d0",))]
)
async def test_a_late_worker_is_better_than_one_without_room(
    late_workers: tuple[str, ...], avoided: tuple[str, ...]
) -> None:
    pipeline = Pipeline(decode=whole_replica, whole=True, prefill_queue_s=1.0)
    pipeline.services.prefill_admission.queues.enter("d0", 10 * DEFAULT_RATE, key="d0")
    admission = AdmissionResult(late_workers=late_workers)
    prompt = await pipeline.services.prefill.prepare(request_context(prompt=[5]), admission)
    assert prompt.workers_to_avoid == avoided
    prompt.close(None)


async def test_a_prompt_that_is_not_counted_is_not_refused() -> None:
    pipeline = Pipeline(decode=whole_replica, whole=True, prefill_queue_s=1.0)
    for replica in ("d0", "d1", "d2"):
        pipeline.services.prefill_admission.queues.enter(replica, 10 * DEFAULT_RATE, key=replica)
    assert await pipeline.run(prompt=["a", "b"], n=2) == b"ab"


async def test_prompt_sizes_are_learnt_from_true_counts_and_not_from_estimates(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def tokenise(self: PromptTokenizer, fields: RequestFields) -> Any:
        return np.arange(9, dtype=np.uint32) if fields.prompt == text else None

    monkeypatch.setattr(PromptTokenizer, "tokenise", tokenise)
    pipeline, text, other = Pipeline(decode=whole_replica, whole=True), "x" * 90, "y" * 90
    estimate = partial(pipeline.services.prefill_admission.estimate_tokens, request_context(prompt=other))
    for _ in range(3):
        await pipeline.run(prompt=other)  # its tokens stay unknown
    assert estimate() == 90 / 4
    for _ in range(300):
        async for _ in pipeline.path.generate(request_context(prompt=text)):
            pass
    assert estimate() == pytest.approx(9, rel=0.1)


async def test_the_prompt_of_a_resumed_answer_includes_its_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    async def lost_once(sent: Sent) -> Any:
        if sent.method == WAIT_FOR_COUNTS:
            return
        if not sent.header["generated"]:
            yield b"a", 2, pack_ids(8, 9)
            raise ChannelLostError("it is dead")
        yield b"b" + END, 1, pack_ids(10)

    pipeline = Pipeline(decode=lost_once, whole=True)
    finished: list[int] = []
    monkeypatch.setattr(
        pipeline.services.prefill_admission, "finish", lambda ticket, tokens: finished.append(tokens)
    )
    assert await pipeline.run(prompt=[5, 6, 7], stream=True) == b"ab" + END
    assert finished == [3, 5]
