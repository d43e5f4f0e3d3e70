"""Checks of the engine contract (`eldr_serve.engine.protocol`), for any engine.

`tests/unit/engine/test_protocol.py` runs them on the fake engine, and `tests/engine/test_contract.py` on
vLLM's engines.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import numpy as np

from eldr_serve.engine.calls import EXPERT_COUNTS_KEY
from eldr_serve.engine.protocol import CalibrationEngine, Engine, EngineRequest, PrefilledPrompt, Sampling
from eldr_serve.engine.routes import unpack_routes
from eldr_serve.errors import RequestRefusedError
from eldr_serve.experts.signature import Counts, unpack_counts

CHECK_TIMEOUT_S = 60.0
PROMPT = "the prompt"
CALIBRATED = ("12345678", "abcdefgh")  # prompts of 8 tokens each in the tests' tokenizers
LONG = 400  # tokens of an answer that must be cancelled


@dataclass(frozen=True)
class Subject:
    """Engines of one model, and the expected properties.

    Attributes:
        prefills: computes prompts for others.
        generates: computes its own prompts, and reads those of `prefills`, which may be the same engine.
        ids: tokens of PROMPT.
        shape: number of MoE layers, and of experts per layer.
        top_k: experts per token.
    """

    prefills: Engine
    generates: Engine
    ids: list[int]
    shape: tuple[int, int]
    top_k: int


class Sent:
    """Output of an engine, and an event for its first part."""

    def __init__(self) -> None:
        self.parts: list[tuple[bytes, int, bytes]] = []
        self.begun = asyncio.Event()

    def __call__(self, payload: bytes, tokens: int, ids: bytes = b"") -> None:
        self.parts.append((payload, tokens, ids))
        self.begun.set()

    @property
    def payload(self) -> bytes:
        return b"".join(payload for payload, *_ in self.parts)

    @property
    def tokens(self) -> int:
        return sum(tokens for _, tokens, _ in self.parts)

    @property
    def ids(self) -> bytes:
        return b"".join(ids for *_, ids in self.parts)


def request(
    name: str,
    *,
    tokens: int = 4,
    stream: bool = True,
    prefilled: PrefilledPrompt | None = None,
    generated: bytes = b"",
    sampled: bool = False,
    model: str = "m",
) -> EngineRequest:
    """Return a completion request for PROMPT.

    Args:
        name: the request's id.
        tokens: number of tokens of its answer.
        prefilled: the prompt as another engine has computed it; None: the engine computes it.
        generated: ids of the tokens that an engine which was lost has sent.
        sampled: whether the engine returns a sample.
        model: name of the model or of an adapter.
    """
    body = {"model": model, "prompt": PROMPT, "max_tokens": tokens, "stream": stream}
    body |= {"ignore_eos": True, "temperature": 0}
    ids = b"" if prefilled is None else prefilled.token_ids.tobytes()
    return EngineRequest(
        "completions",
        json.dumps(body).encode(),
        name,
        kv_transfer_params=prefilled and prefilled.kv_transfer_params,
        token_ids=ids,
        generated=generated,
        sampled=sampled,
        domain="poems",
    )


def _check_counts_of_prompt(subject: Subject, packed: str, tokens: int) -> None:
    """Check that each of `tokens` tokens has chosen its experts in each layer."""
    counts: Counts = unpack_counts(packed)
    assert counts.shape == subject.shape, counts.shape
    assert (counts.sum(axis=1) == tokens * subject.top_k).all(), counts.sum(axis=1)


async def prefill_gives_ids_a_handle_and_counts_of_the_prompt(subject: Subject) -> None:
    prefilled = await subject.prefills.prefill(request("prefill"))
    assert prefilled.token_ids.dtype == np.uint32
    assert prefilled.token_ids.tolist() == subject.ids, prefilled.token_ids
    assert prefilled.kv_transfer_params.keys() - {EXPERT_COUNTS_KEY}  # location of the blocks
    _check_counts_of_prompt(subject, prefilled.kv_transfer_params[EXPERT_COUNTS_KEY], len(subject.ids))
    await subject.prefills.release("prefill")


async def the_shape_is_that_of_the_counts(subject: Subject) -> None:
    assert await subject.prefills.measure_shape() == subject.shape


async def an_answer_is_a_stream_that_ends(subject: Subject) -> None:
    sent = Sent()
    await subject.generates.generate(request("stream"), sent)
    assert sent.tokens == 4, sent.parts
    assert len(sent.ids) == 4 * 4, sent.parts
    assert sent.payload.endswith(b"data: [DONE]\n\n"), sent.payload
    assert len(sent.parts) > 1  # the answer is streamed while it is generated


async def an_answer_of_a_prompt_that_another_engine_holds_is_the_same(subject: Subject) -> None:
    prefilled = await subject.prefills.prefill(request("held"))
    sent, alone = Sent(), Sent()
    await subject.generates.generate(request("held", prefilled=prefilled), sent)
    await subject.generates.generate(request("alone"), alone)
    assert sent.ids == alone.ids, (sent.parts, alone.parts)
    assert sent.tokens == 4, sent.parts
    assert sent.payload.endswith(b"data: [DONE]\n\n"), sent.payload


async def an_answer_that_is_not_streamed_is_one_body(subject: Subject) -> None:
    sent = Sent()
    await subject.generates.generate(request("unstreamed", stream=False), sent)
    assert json.loads(sent.payload)["choices"][0]["text"]
    assert sent.tokens == 4, sent.parts


async def what_an_engine_that_was_lost_has_sent_is_not_sent_again(subject: Subject) -> None:
    whole, rest = Sent(), Sent()
    await subject.generates.generate(request("lost"), whole)
    await subject.generates.generate(request("goes-on", generated=whole.ids[:8]), rest)
    assert rest.ids == whole.ids[8:], (whole.parts, rest.parts)
    assert rest.payload.endswith(b"data: [DONE]\n\n"), rest.payload


async def a_call_that_is_cancelled_ends_in_the_engine(subject: Subject) -> None:
    abandoned, other = Sent(), Sent()
    call = asyncio.create_task(subject.generates.generate(request("left", tokens=LONG), abandoned))
    await abandoned.begun.wait()
    call.cancel()
    await asyncio.wait([call])
    assert call.cancelled()
    num_parts = len(abandoned.parts)
    subject.generates.take_steps()
    await subject.generates.generate(request("other", tokens=32), other)
    assert len(abandoned.parts) == num_parts, abandoned.parts
    sums = subject.generates.take_steps()  # if it were still running, there would be twice as many
    assert sums.requests <= 1.5 * sums.steps, sums


async def a_prompt_may_be_released_twice_and_one_that_was_never_there(subject: Subject) -> None:
    await subject.prefills.prefill(request("released"))
    for name in ("released", "released", "never"):
        await subject.prefills.release(name)
    await subject.prefills.check_health()
    await subject.prefills.prefill(request("after"))
    await subject.prefills.release("after")


async def an_engine_says_how_full_it_is(subject: Subject) -> None:
    for engine in (subject.prefills, subject.generates):
        assert 0 <= engine.kv_usage() <= 1
        sizes = engine.prefix_cache()  # tokens of a block, and of the cache
        assert sizes is None or 0 < sizes[0] <= sizes[1], sizes
    sums = subject.generates.take_steps()
    assert sums.steps >= 0
    assert sums.seconds >= 0


async def a_signature_is_that_of_the_prompt(subject: Subject) -> None:
    counting = asyncio.create_task(subject.generates.wait_for_counts("whole prompt"))
    await asyncio.sleep(0)  # counts are requested before the engine gets the prompt
    await subject.generates.generate(request("whole prompt"), Sent())
    tokens, packed = await counting
    assert tokens == len(subject.ids), tokens
    _check_counts_of_prompt(subject, packed, tokens)


async def a_sampled_request_gives_a_sample_once(subject: Subject) -> None:
    engine = subject.generates
    engine.take_samples()
    for stream in (True, False):
        name, sent = f"sampled {stream}", Sent()
        await asyncio.gather(
            engine.generate(request(name, tokens=5, stream=stream, sampled=True), sent),
            engine.generate(request("not sampled", tokens=5, stream=stream), Sent()),
        )
        (sample,) = engine.take_samples()
        assert b"eldr_" not in sent.payload, sent.payload  # counts are not sent to clients
        assert (sample.request_id, sample.domain) == (name, "poems")
        assert sample.token_ids.dtype == np.uint32
        assert sample.token_ids.tolist() == subject.ids, sample.token_ids
        assert sample.decode_steps == 4, sample.decode_steps  # the last token reaches no router
        for counts, tokens in ((sample.prefill_counts, len(subject.ids)), (sample.decode_counts, 4)):
            assert counts.shape == subject.shape, counts.shape
            assert counts.dtype.kind == "u", counts.dtype
            assert (counts.sum(axis=1) == tokens * subject.top_k).all(), counts.sum(axis=1)
        assert engine.take_samples() == []


async def a_sampled_request_without_a_decode_step_gives_no_sample(subject: Subject) -> None:
    await subject.generates.generate(request("one token", tokens=1, sampled=True), Sent())
    assert subject.generates.take_samples() == []


async def a_sampled_request_that_is_cancelled_gives_no_sample(subject: Subject) -> None:
    sent = Sent()
    call = asyncio.create_task(
        subject.generates.generate(request("left early", tokens=LONG, sampled=True), sent)
    )
    await sent.begun.wait()
    call.cancel()
    await asyncio.wait([call])
    await subject.generates.generate(request("later"), Sent())
    assert subject.generates.take_samples() == []


async def a_request_is_refused_by_prefill_as_by_generate(subject: Subject) -> None:
    broken = EngineRequest("completions", b"[", "broken")
    answers = []
    for engine, call in (
        (subject.prefills, subject.prefills.prefill(broken)),
        (subject.generates, subject.generates.generate(broken, Sent())),
    ):
        try:
            await call
        except Exception as error:  # each engine has its own error messages
            answers.append((engine.status_of(error), str(error)))
    assert len(answers) == 2, answers
    assert answers[0] == answers[1], answers
    assert 400 <= answers[0][0] < 500, answers


async def an_endpoint_that_is_not_there_is_refused(subject: Subject) -> None:
    try:
        await subject.generates.serve_endpoint(EngineRequest("nothing", b"{}"), Sent())
    except RequestRefusedError as error:
        assert error.status == 400  # noqa: PT017 - the checks run without pytest, too
    else:
        raise AssertionError("the engine answered")


Check = Callable[[Subject], Awaitable[None]]
CHECKS: dict[str, Check] = {
    check.__name__: check
    for check in (
        prefill_gives_ids_a_handle_and_counts_of_the_prompt,
        the_shape_is_that_of_the_counts,
        an_answer_is_a_stream_that_ends,
        an_answer_of_a_prompt_that_another_engine_holds_is_the_same,
        an_answer_that_is_not_streamed_is_one_body,
        what_an_engine_that_was_lost_has_sent_is_not_sent_again,
        a_call_that_is_cancelled_ends_in_the_engine,
        a_prompt_may_be_released_twice_and_one_that_was_never_there,
        an_engine_says_how_full_it_is,
        a_signature_is_that_of_the_prompt,
        a_sampled_request_gives_a_sample_once,
        a_sampled_request_without_a_decode_step_gives_no_sample,
        a_sampled_request_that_is_cancelled_gives_no_sample,
        a_request_is_refused_by_prefill_as_by_generate,
        an_endpoint_that_is_not_there_is_refused,
    )
}


async def run_check(check: Check, subject: Subject) -> None:
    """Run one check within CHECK_TIMEOUT_S."""
    async with asyncio.timeout(CHECK_TIMEOUT_S):
        await check(subject)


# -- calibration -----------------------------------------------------------------------------------------


def a_calibration_engine_counts_prefill_and_decode_separately(
    engine: CalibrationEngine, shape: tuple[int, int], top_k: int, routes: bool
) -> None:
    """Prompts of 8 tokens are counted together, with 5 generated tokens each."""
    prompts = [list(engine.tokenizer.encode(text)) for text in CALIBRATED]
    assert engine.max_model_len > max(map(len, prompts)) + 5
    records = engine.calibrate(prompts, [Sampling(5, 0.0, ignore_eos=True, routes=routes)] * len(prompts))
    assert [record["token_ids"] for record in records] == prompts
    for prompt, record in zip(prompts, records, strict=True):
        prefill, decode = unpack_counts(record["eldr_prefill"]), unpack_counts(record["eldr_decode"])
        assert prefill.shape == decode.shape == shape, (prefill.shape, decode.shape)
        assert (prefill.sum(axis=1) == len(prompt) * top_k).all(), prefill
        assert record["eldr_decode_steps"] == 4, record["eldr_decode_steps"]
        assert (decode.sum(axis=1) == 4 * top_k).all(), decode
        assert (record["eldr_routes"] is not None) == routes
        if routes:
            routes_of_prompt = unpack_routes(record["eldr_routes"])
            assert routes_of_prompt.shape == (4, shape[0], top_k), routes_of_prompt.shape
            counted = (routes_of_prompt[..., None] == np.arange(shape[1])).sum(axis=(0, 2))
            np.testing.assert_array_equal(counted, decode)
