"""Chunks of plain streams equal those of vLLM's server byte for byte."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st
from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
from vllm.outputs import CompletionOutput, RequestOutput

from eldr_serve.engine.vllm.compat.serve_llm import ChatCompletionRequest, CompletionRequest
from eldr_serve.engine.vllm.requests.plain_stream import PlainStream, is_plain

FINISHES = [("length", None), ("stop", None), ("stop", "ende"), ("stop", 7), ("abort", None), ("error", None)]
outputs = st.lists(
    st.tuples(st.text(max_size=6), st.lists(st.integers(0, 99), max_size=3)), min_size=1, max_size=8
)


def make_serving(kind: Any) -> Any:
    """Return vLLM's serving object without an engine, with the attributes that its stream generator reads."""
    serving_object = object.__new__(kind)
    off = ("force_include_usage", "per_request_metrics", "log_outputs")
    serving_object.__dict__ |= {f"enable_{name}": False for name in off} | {
        "enable_prompt_tokens_details": True,
        "_include_reasoning_tokens_details": False,
        "log_error_stack": False,
        "parser_cls": None,
        "request_logger": None,
        "response_role": "assistant",
        "system_fingerprint": "vllm-test",
    }
    return serving_object


def results(choices: list[tuple[str, list[int]]], finish: tuple[str, Any], fails: bool) -> Any:
    async def generate() -> AsyncIterator[RequestOutput]:
        for number, (text, tokens) in enumerate(choices):
            last = number == len(choices) - 1
            if fails and last:
                raise RuntimeError("the engine is gone")
            output = CompletionOutput(0, text, list(tokens), None, None)
            if last:
                output.finish_reason, output.stop_reason = finish
            yield RequestOutput("id", "the prompt", [1, 2, 3], None, [output], last, num_cached_tokens=2)

    return generate()


async def with_prompt_index(results: Any) -> AsyncIterator[Any]:
    async for result in results:
        yield 0, result


def stream(serving_object: Any, request: Any, outputs: Any, generator: Any) -> Any:
    if isinstance(serving_object, OpenAIServingChat):
        return generator(request, outputs, "chatcmpl-1", "m", request.messages, object(), Metadata())
    return generator(
        request,
        [],
        with_prompt_index(outputs),
        "cmpl-1",
        5,
        "m",
        num_prompts=1,
        tokenizer=None,
        request_metadata=Metadata(),
    )


class Metadata:
    final_usage_info: Any = None


def make_request(method: str, **fields: Any) -> tuple[Any, Any]:
    if method == "chat":
        messages = [{"role": "user", "content": "hi"}]
        return make_serving(OpenAIServingChat), ChatCompletionRequest(model="m", messages=messages, **fields)
    return make_serving(OpenAIServingCompletion), CompletionRequest(
        model="m", prompt="p", max_tokens=9, **fields
    )


@given(
    st.sampled_from(["chat", "completions"]),
    outputs,
    st.sampled_from(FINISHES),
    st.booleans(),
    st.booleans(),
    st.booleans(),
)
async def test_a_plain_stream_equals_vllms(
    method: str,
    choices: list[tuple[str, list[int]]],
    finish: tuple[str, Any],
    usage: bool,
    echo: bool,
    fails: bool,
) -> None:
    options = {"stream_options": {"include_usage": True}} if usage else {}
    serving, request = make_request(method, stream=True, echo=echo, **options)
    assert is_plain(serving, request)
    name = "chat_completion_stream_generator" if method == "chat" else "completion_stream_generator"
    generator = getattr(serving, name)
    with patch("time.time", lambda: 1.0):
        expected = [c async for c in stream(serving, request, results(choices, finish, fails), generator)]
        chunks: list[str] = []
        plain = PlainStream(generator, lambda chunk: chunks.append(chunk.decode()))
        async for chunk in stream(serving, request, results(choices, finish, fails), plain):
            chunks.append(chunk)
    assert chunks == expected


async def without_marker(outputs: Any) -> AsyncIterator[Any]:
    """Yield the outputs that vLLM's generator would get if it dropped the marker."""
    async for index, result in outputs:
        if "\x00" not in result.outputs[0].text:
            yield index, result


async def one_ahead(outputs: Any) -> AsyncIterator[Any]:
    """Yield the outputs as to a generator that always reads the next one before it makes a chunk."""
    last = await anext(outputs)
    async for pair in outputs:
        yield last
        last = pair
    yield last


@pytest.mark.parametrize("read", [without_marker, one_ahead])
async def test_a_generator_that_makes_no_chunk_of_the_marker_makes_all_chunks(read: Any) -> None:
    serving, request = make_request("completions", stream=True)

    async def generator(request: Any, prompts: Any, outputs: Any, *args: Any, **kwargs: Any) -> Any:
        async for chunk in serving.completion_stream_generator(
            request, prompts, read(outputs), *args, **kwargs
        ):
            yield chunk

    choices = [(f"{number} ", [number]) for number in range(20)]
    with patch("time.time", lambda: 1.0):
        answers = results(choices, FINISHES[0], False)
        expected = [c async for c in stream(serving, request, answers, generator)]
        plain = PlainStream(generator, lambda chunk: pytest.fail("vLLM did not make this chunk"))
        chunks = [c async for c in stream(serving, request, results(choices, FINISHES[0], False), plain)]
    assert chunks == expected


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 2},
        {"logprobs": True},
        {"return_token_ids": True},
        {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    ],
)
@pytest.mark.parametrize("method", ["chat", "completions"])
def test_chunks_that_differ_in_more_than_text_are_made_by_vllm(method: str, fields: dict[str, Any]) -> None:
    serving, request = make_request(method, stream=True, **fields)
    assert not is_plain(serving, request)


def test_requests_with_several_prompts_logprobs_or_parsers_are_left_to_vllm() -> None:
    serving, request = make_request("completions", stream=True)
    assert not is_plain(serving, request.model_copy(update={"prompt": ["a", "b"]}))
    assert not is_plain(serving, request.model_copy(update={"logprobs": 0}))
    assert is_plain(serving, request.model_copy(update={"prompt": [1, 2]}))
    serving.parser_cls = object
    assert not is_plain(serving, request)


async def test_chunks_in_the_middle_do_not_call_vllms_generator() -> None:
    serving, request = make_request("completions", stream=True)
    num_calls = 0

    async def count_calls(*args: Any, **kwargs: Any) -> AsyncIterator[str]:
        nonlocal num_calls
        async for chunk in serving.completion_stream_generator(*args, **kwargs):
            num_calls += 1
            yield chunk

    sent: list[bytes] = []
    plain = PlainStream(count_calls, sent.append)
    choices = [("a", [1])] * 50
    async for _ in stream(serving, request, results(choices, FINISHES[0], False), plain):
        pass
    assert len(sent) == 48
    assert num_calls == 4  # the first, one to learn the format, the last, [DONE]
