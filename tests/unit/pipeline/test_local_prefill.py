"""Short prompts that the decode engine computes beside prefill engines, where that is sooner."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from eldr_serve.engine.report_fields import BLOCK_TOKENS, QUEUE
from eldr_serve.pipeline.context.request_context import RequestContext
from eldr_serve.scheduling import StepCost
from eldr_serve.scheduling.decode_loads import DecodeLoads, StepTimeModel, WorkerLoads
from tests.support.fake_fleet import Sent, refusal
from tests.support.request_path import Pipeline, good_decode, request_context

TOKENS = 100  # tokens of the prompt: 0.1 s on a prefill engine and as long on a decode engine
COST = StepCost(fixed_s=0.01, per_request_s=0.01, per_expert_s=0.0)
STEP = StepTimeModel(COST, local_prompt_token_s=1e-3)


def loads(*in_flight: int, **fields: Any) -> DecodeLoads:
    names = tuple(f"d{number}" for number in range(len(in_flight)))
    cached_tokens = np.array(fields.pop("cached_tokens", [0] * len(in_flight)))
    workers = WorkerLoads(names, np.array(in_flight), np.array(in_flight), cached_tokens)
    return DecodeLoads(workers, **{"step": STEP, **fields})


def busy_pipeline(*, queued: float = 5000.0, handover_s: float = 0.01, **options: Any) -> Pipeline:
    """Return a path whose prefill engines have so many queued tokens each, all rates being measured."""
    pipeline = Pipeline(**{"local_prefill_tokens": 200, **options})
    queue_prompts(pipeline, queued)
    pipeline.services.stage_latencies.record(first_token=handover_s)
    pipeline.router.loads = loads(0, 0, 0)
    return pipeline


def queue_prompts(pipeline: Pipeline, queued: float, *, number: int = 0) -> None:
    report = {"number": number, "rate": 1000.0, "measured_s": 60.0, "num_ingresses": 2, "tokens": queued}
    reports = {name: {QUEUE: report} for name in pipeline.prefill.live_workers}
    pipeline.prefill.directory.update_reports(reports)


async def send(pipeline: Pipeline, tokens: int = TOKENS) -> RequestContext:
    context = request_context(prompt=[5] * tokens, stream=True)
    async for _ in pipeline.path.generate(context):
        pass
    return context


async def test_by_default_no_prompt_is_prefilled_locally_and_no_loads_are_requested() -> None:
    pipeline = busy_pipeline(local_prefill_tokens=0)
    context = await send(pipeline)
    assert len(pipeline.prefill.requests) == 1
    assert pipeline.decode.requests[0].kv["do_remote_prefill"]
    assert not pipeline.router.blocks
    assert "prefilled_locally" not in pipeline.counters.events
    assert not context.log_line()["local_prefill"]


async def test_a_short_prompt_with_a_long_prefill_queue_is_sent_to_its_decode_engine_alone() -> None:
    pipeline = busy_pipeline()
    context = await send(pipeline)
    assert not pipeline.prefill.requests
    (sent,) = pipeline.decode.requests  # no call for expert counts
    assert (sent.method, sent.kv) == ("generate", {})
    assert sent.header["tokens_to_compute"] == TOKENS
    ((placement, counts),) = pipeline.router.placements
    assert (placement.prompt_tokens, placement.exclude, counts) == (TOKENS, (), None)
    assert pipeline.router.token_ids[0].tolist() == [5] * TOKENS  # a predictor predicts counts from them
    assert pipeline.counters.events.count("prefilled_locally") == 1
    line = context.log_line()
    assert (line["local_prefill"], line["prefill"]) == (True, None)


@pytest.mark.parametrize(
    ("tokens", "options", "decode_loads"),
    [
        (201, {}, loads(0, 0, 0)),  # the prompt is above the bound
        (TOKENS, {"queued": 0.0}, loads(0, 0, 0)),  # 0.11 s elsewhere, 0.12 s here
        (TOKENS, {"queued": 30.0}, loads(0, 0, 0)),  # 0.14 s elsewhere, 0.144 s here with the margin
        (TOKENS, {}, loads(60, 60, 60)),  # each of the running requests would wait 0.1 s
        (TOKENS, {}, loads(0, 0, 0, waiting=1)),
        (TOKENS, {}, loads(0, 0, 0, step=StepTimeModel(COST))),  # no decode engine has computed a prompt
        (TOKENS, {}, loads(0, 0, 0, step=StepTimeModel(local_prompt_token_s=1e-3))),  # no step was measured
        (TOKENS, {}, None),  # the router does not answer
    ],
)
async def test_a_prompt_goes_to_a_prefill_engine_unless_its_decode_engine_is_sooner(
    tokens: int, options: dict[str, Any], decode_loads: DecodeLoads | None
) -> None:
    pipeline = busy_pipeline(**options)
    pipeline.router.loads = decode_loads
    await send(pipeline, tokens)
    assert len(pipeline.prefill.requests) == 1
    assert "prefilled_locally" not in pipeline.counters.events


async def test_unknown_rates_and_hand_overs_are_not_assumed() -> None:
    without_rate = Pipeline(local_prefill_tokens=200)
    without_rate.services.stage_latencies.record(first_token=9.0)
    without_handover = Pipeline(local_prefill_tokens=200)
    queue_prompts(without_handover, 5000.0)
    for pipeline in (without_rate, without_handover):
        pipeline.router.loads = loads(0, 0, 0)
        await send(pipeline)
        assert len(pipeline.prefill.requests) == 1


async def test_workers_at_which_local_prefill_is_not_sooner_are_avoided() -> None:
    pipeline = busy_pipeline()
    pipeline.router.loads = loads(60, 0, 60)
    await send(pipeline)
    assert not pipeline.prefill.requests
    assert pipeline.router.placements[0][0].exclude == ("d0", "d2")


async def test_cached_tokens_take_no_time() -> None:
    pipeline = busy_pipeline(queued=0.0)
    pipeline.decode.directory.publish({name: {BLOCK_TOKENS: 16} for name in ("d0", "d1", "d2")})
    pipeline.router.loads = loads(0, 0, 0, cached_tokens=[0, 96, 0])  # 0.11 s elsewhere, 0.024 s at d1
    await send(pipeline)
    assert not pipeline.prefill.requests
    assert pipeline.router.placements[0][0].exclude == ("d0", "d2")
    assert len(pipeline.router.blocks[0].hashes) == TOKENS // 16


async def test_prompts_that_arrive_together_count_each_other() -> None:
    pipeline = busy_pipeline(queued=500.0)
    pipeline.router.loads = loads(0)
    started, may_answer = 0, asyncio.Event()

    async def decode(sent: Sent) -> Any:
        nonlocal started
        started += 1
        await may_answer.wait()
        async for chunk in good_decode(sent):
            yield chunk

    pipeline.decode.answer = decode
    tasks = [asyncio.create_task(send(pipeline)) for _ in range(6)]
    while started < 6:
        await asyncio.sleep(0)
    may_answer.set()
    await asyncio.gather(*tasks)
    # The first four wait for 0, 0.1, 0.2 and 0.3 s of prompts and take 0.12 s. Elsewhere each takes 0.61 s.
    assert pipeline.counters.events.count("prefilled_locally") == 4
    assert len(pipeline.prefill.requests) == 2
    assert pipeline.services.prefill.local_prefill.queues.outstanding_tokens == 0


@pytest.mark.parametrize("is_local", [True, False])
async def test_a_retry_is_prefilled_as_the_first_attempt_was(is_local: bool) -> None:
    pipeline = busy_pipeline(queued=5000.0 if is_local else 0.0)

    async def decode(sent: Sent) -> Any:
        if sent.replica == "d0":
            queue_prompts(pipeline, 0.0 if is_local else 5000.0, number=1)
            raise refusal(500)
        async for chunk in good_decode(sent):
            yield chunk

    pipeline.decode.answer = decode
    context = await send(pipeline)
    assert [sent.replica for sent in pipeline.decode.requests] == ["d0", "d1"]
    assert len(pipeline.prefill.requests) == (0 if is_local else 2)
    assert pipeline.counters.events.count("prefilled_locally") == is_local
    assert context.log_line()["local_prefill"] == is_local
