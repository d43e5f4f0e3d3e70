"""An answer that another engine has begun continues with exactly the bytes that one engine would send."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.sampling_params import SamplingParams

from eldr_serve.engine.calls import CREATED_TOKENS_KEY, is_end
from eldr_serve.engine.protocol import EngineRequest
from eldr_serve.engine.vllm.requests.continuation import Continuation
from eldr_serve.engine.vllm.requests.request_parsing import parse_request
from tests.support.fake_vllm import EOS, PROMPT, TOKENIZER, FakeChat, FakeClient, engine

TEXT = "Die Straße: 春眠不覚暁 - naïve 🦊🦊 ends. END of it"  # some characters consist of several tokens
SCRIPT = [*TOKENIZER.encode(TEXT), EOS]


@dataclass
class Frames:
    """The frames of an answer: token ids, or None if they are not reported, and bytes."""

    sent: list[tuple[list[int] | None, bytes]] = field(default_factory=list)
    transport_s: float | None = None
    cached_tokens: float | None = None

    def send(self, payload: bytes, tokens: int, ids: bytes = b"") -> None:
        self.sent.append((np.frombuffer(ids, np.uint32).tolist() if ids else None, payload))

    def up_to(self, cut: int | None) -> tuple[list[int], bytes]:
        ids = [token for frame_ids, _ in self.sent[:cut] for token in frame_ids or []]
        return ids, b"".join(payload for _, payload in self.sent[:cut])


def next_token(before: list[int]) -> int:
    return SCRIPT[len(before) - len(PROMPT)]


class Stamped(FakeClient):
    """A client whose outputs have the time of their request's first step, and its cached tokens."""

    async def generate(self, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        async for output in super().generate(*args, **kwargs):
            output.metrics = SimpleNamespace(scheduled_ts=time.monotonic() + 1000)
            output.num_cached_tokens = 3
            yield output


async def answer(
    method: str,
    fields: dict[str, Any],
    *,
    generated: list[int] | None = None,
    created: int | None = None,
    client: FakeClient | None = None,
    now: int = 100,
) -> Frames:
    hi = {"messages": [{"role": "user", "content": "hi"}]}
    prompt = {"prompt": "hi"} if method == "completions" else hi
    body = json.dumps({"model": "m", "temperature": 0} | prompt | fields).encode()
    ids = np.asarray(generated or [], np.uint32).tobytes()
    request = EngineRequest(method, body, "r", generated=ids, created=created)
    frames = Frames()
    with patch("time.time", lambda: float(now)):
        report = await engine(client or FakeClient(next_token), now).generate(request, frames.send)
    frames.transport_s, frames.cached_tokens = report.transport_s, report.cached_tokens
    return frames


requests = st.fixed_dictionaries(
    {
        "stream": st.just(True),
        "max_tokens": st.integers(1, len(SCRIPT) + 5),
        "stop": st.lists(st.sampled_from(["END", "🦊🦊", "ve 🦊", "覚暁", "zzz", ". E"]), max_size=2),
        "include_stop_str_in_output": st.booleans(),
        "stream_options": st.sampled_from([None, {"include_usage": True}]),
        "echo": st.booleans(),
    },
    optional={"min_tokens": st.integers(0, 20), "return_token_ids": st.booleans()},
)


@settings(max_examples=150)
@given(st.sampled_from(["chat", "completions"]), requests, st.sampled_from([None, 0, 1, 4]), st.data())
async def test_a_stream_that_is_cut_anywhere_continues_with_the_same_bytes(
    method: str, fields: dict[str, Any], logprobs: int | None, data: Any
) -> None:
    fields["min_tokens"] = min(fields.get("min_tokens", 0), fields["max_tokens"])
    fields["echo"] &= method == "completions"  # a chat's echo asks for the prompt's log-probabilities
    if logprobs is not None and method == "chat":
        fields |= {"logprobs": True, "top_logprobs": logprobs}
    elif logprobs is not None:
        fields = fields | {"logprobs": logprobs, "echo": False}
    undisturbed = await answer(method, fields)
    cut = data.draw(st.integers(0, len(undisturbed.sent) - 1))
    ids, begun = undisturbed.up_to(cut)
    client = FakeClient(next_token)
    created, now = (100, 999) if begun else (None, 100)
    rest = await answer(method, fields, generated=ids, created=created, client=client, now=now)
    whole_ids, whole = undisturbed.up_to(None)
    rest_ids, ending = rest.up_to(None)
    assert begun + ending == whole
    assert ids + rest_ids == whole_ids
    assert client.prompts == [[*PROMPT, *ids]]  # what was generated is not generated again
    assert client.open == 0


@settings(max_examples=60)
@given(st.integers(1, len(SCRIPT) + 5), st.lists(st.sampled_from(["END", "ve 🦊"]), max_size=2), st.data())
async def test_a_message_that_is_cut_anywhere_continues_with_the_same_bytes(
    max_tokens: int, stop: list[str], data: Any
) -> None:
    fields = {"stream": True, "max_tokens": max_tokens, "stop_sequences": stop}
    undisturbed = await answer("messages", fields)
    cut = data.draw(st.integers(0, len(undisturbed.sent) - 1))
    ids, begun = undisturbed.up_to(cut)
    rest = await answer("messages", fields, generated=ids)
    rest_ids, ending = rest.up_to(None)
    whole_ids, whole = undisturbed.up_to(None)
    assert (ids + rest_ids, begun + ending) == (whole_ids, whole)
    assert is_end(whole)


async def test_answers_with_random_ids_send_no_ids_of_tokens() -> None:
    frames = Frames()
    request = parse_request(EngineRequest("completions", b'{"model": "m", "prompt": "hi"}', "r"))
    client = Continuation(FakeClient(next_token), frames.send, request, [], None, random_ids=True)
    async for _ in client.generate({"prompt_token_ids": PROMPT}, SamplingParams(max_tokens=4), "r"):
        client.write(b"x")
    client.end()
    assert frames.sent
    assert all(ids is None for ids, _ in frames.sent)


@settings(max_examples=60)
@given(st.sampled_from(["chat", "completions"]), requests, st.data())
async def test_an_unstreamed_answer_that_is_cut_anywhere_stays_the_same(
    method: str, fields: dict[str, Any], data: Any
) -> None:
    fields |= {"stream": False, "stream_options": None, "min_tokens": 0, "echo": method == "completions"}
    undisturbed = await answer(method, fields)
    assert all(not payload for _, payload in undisturbed.sent[:-1])
    ids, _ = undisturbed.up_to(data.draw(st.integers(0, len(undisturbed.sent) - 1)))
    rest = await answer(method, fields, generated=ids)
    (rest_ids, ending), (whole_ids, whole) = rest.up_to(None), undisturbed.up_to(None)
    assert json.loads(ending) == json.loads(whole)
    assert ids + rest_ids == whole_ids


@pytest.mark.parametrize("method", ["chat", "completions"])
@pytest.mark.parametrize(
    "fields",
    [
        {"seed": 1, "temperature": 1.0},
        {"presence_penalty": 0.5},
        {"frequency_penalty": 0.5},
        {"bad_words": ["x"]},
        {"structured_outputs": {"regex": "a*"}},
        {"logprobs": True, "stream": False},
    ],
)
async def test_answers_that_need_more_than_token_ids_do_not_report_them(
    method: str, fields: dict[str, Any]
) -> None:
    frames = await answer(method, {"stream": True, "max_tokens": 9} | fields)
    assert {ids is None for ids, _ in frames.sent} == {True}


@pytest.mark.parametrize("fields", [{"seed": 1}, {"repetition_penalty": 1.2}, {"temperature": 1.0}])
async def test_answers_that_need_only_token_ids_report_them(fields: dict[str, Any]) -> None:
    frames = await answer("completions", {"stream": True, "max_tokens": 9} | fields)
    assert all(ids for ids, _ in frames.sent)


async def test_tool_calls_have_random_ids_and_are_not_resumed() -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    frames = await answer("chat", {"stream": True, "max_tokens": 9, "tools": [tool], "tool_choice": "auto"})
    assert {ids is None for ids, _ in frames.sent} == {True}


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("method", ["chat", "completions"])
async def test_a_death_of_the_engine_core_during_an_answer_is_an_engine_error(
    method: str, stream: bool
) -> None:
    fields = {"stream": stream, "max_tokens": 30}
    with pytest.raises(RuntimeError, match="the engine is gone"):
        await answer(method, fields, client=FakeClient(next_token, dies_after=20))


@pytest.mark.parametrize("method", ["chat", "completions"])
@pytest.mark.parametrize("stream", [True, False])
async def test_an_answer_reports_its_wait_for_the_first_step_and_cached_tokens(
    method: str, stream: bool
) -> None:
    fields = {"stream": stream, "max_tokens": 4}
    frames = await answer(method, fields, client=Stamped(next_token))
    assert frames.transport_s is not None
    assert 0 < frames.transport_s - 1000 < 100  # the time before the last output counts
    assert frames.cached_tokens == 3
    assert (await answer(method, fields)).transport_s is None  # disable_log_stats has this effect


# -- a prompt whose blocks come from a prefill engine --------------------------------------------------


async def test_usage_counts_tokens_that_prefill_wrote_and_a_disconnect_frees_blocks_once() -> None:
    """The engine frees the blocks of its request. The server of vLLM would free them a second time."""
    client = FakeClient(next_token)
    transfer: dict[str, Any] = {"do_remote_prefill": True, CREATED_TOKENS_KEY: 736}
    params = SamplingParams(max_tokens=5, extra_args={"kv_transfer_params": transfer})
    request: Any = SimpleNamespace(stream=True)
    outputs = Continuation(client, Frames().send, request, [], None).generate(
        {"prompt_token_ids": PROMPT, "prompt": "x"}, params, "r"
    )
    assert (await anext(outputs)).num_cache_creation_tokens == 736
    assert transfer["do_remote_prefill"]
    await outputs.aclose()
    assert not transfer["do_remote_prefill"]
    assert not client.open


@pytest.mark.parametrize("stream", [True, False])
async def test_the_usage_of_a_chat_reports_tokens_that_prefill_cached(
    monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    monkeypatch.setattr(FakeChat, "enable_prompt_tokens_details", True)
    options = {"stream_options": {"include_usage": True}} if stream else {}
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}], "max_tokens": 3, "stream": stream}
    kv = {"do_remote_prefill": True, "remote_prefill_cached_tokens": 32, CREATED_TOKENS_KEY: 736}
    request = EngineRequest("chat", json.dumps(body | options).encode(), "r", kv_transfer_params=kv)
    frames = Frames()
    await engine(FakeClient(next_token), 100).generate(request, frames.send)
    _, answer = frames.up_to(None)
    last = answer.split(b"data: ")[-2] if stream else answer
    assert json.loads(last)["usage"]["prompt_tokens_details"]["created_cache_tokens"] == 736
