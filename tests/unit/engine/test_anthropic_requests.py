"""Anthropic's Messages API: vLLM's own converters make chats of requests and messages of answers."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import ValidationError
from vllm.entrypoints.anthropic.serving import AnthropicServingMessages

from eldr_serve.engine.calls import error_event, is_end
from eldr_serve.engine.protocol import EngineRequest
from eldr_serve.engine.vllm.compat.messages import SERVING_NAMES, to_message_events
from eldr_serve.engine.vllm.requests.request_parsing import parse_generation
from eldr_serve.errors import RequestRefusedError

TOOL = {"name": "look_up", "description": "Look up.", "input_schema": {"type": "object", "properties": {}}}
HI = {"role": "user", "content": "hi"}


def make_serving() -> Any:
    """Return vLLM's serving object without its engine."""
    serving_object = object.__new__(AnthropicServingMessages)
    serving_object._merge_inline_system = False
    serving_object._disabled_thinking_effort = "low"
    return serving_object


def parse(**fields: Any) -> Any:
    body = {"model": "m", "max_tokens": 5, "messages": [HI]} | fields
    engine: Any = SimpleNamespace(_app_state=SimpleNamespace(anthropic_serving_messages=make_serving()))
    request = EngineRequest(
        "messages", json.dumps(body).encode(), "id", kv_transfer_params={"held": 1}, cache_salt="salt"
    )
    return parse_generation(request, engine)


def test_vllms_serving_object_has_the_names_that_are_used() -> None:
    assert [name for name in SERVING_NAMES if not hasattr(make_serving(), name)] == []


async def test_a_request_becomes_a_chat() -> None:
    chat = await parse(system="be brief", stop_sequences=["x"], temperature=0.5, tools=[TOOL], stream=True)
    assert [message["role"] for message in chat.messages] == ["system", "user"]
    assert (chat.request_id, chat.kv_transfer_params, chat.cache_salt) == ("id", {"held": 1}, "salt")
    assert (chat.max_completion_tokens, chat.stop, chat.temperature, chat.stream) == (5, ["x"], 0.5, True)
    assert (chat.tools[0].function.name, chat.tool_choice) == ("look_up", "auto")


async def test_disabled_thinking_becomes_the_effort_that_vllm_has_found() -> None:
    assert (await parse(thinking={"type": "disabled"})).reasoning_effort == "low"


async def test_clients_cannot_name_blocks() -> None:
    chat = await parse(kv_transfer_params={"remote_host": "elsewhere"})
    assert chat.kv_transfer_params == {"held": 1}


@pytest.mark.parametrize("fields", [{"max_tokens": 0}, {"messages": "hi"}, {"messages": [{"role": 1}]}])
async def test_an_invalid_request_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        await parse(**fields)


async def test_a_request_that_cannot_be_converted_is_refused() -> None:
    removal = {"type": "tool_removal", "tool": {"type": "tool_reference", "name": "no"}}
    with pytest.raises(RequestRefusedError, match="'no', which is not declared in tools") as refused:
        await parse(messages=[HI, {"role": "system", "content": [removal]}])
    assert refused.value.status == 400


async def test_the_last_event_of_a_message_ends_its_stream() -> None:
    def chunk(**fields: Any) -> str:
        whole = {"id": "x", "object": "chat.completion.chunk", "created": 1, "model": "m"} | fields
        return f"data: {json.dumps(whole)}\n\n"

    def choice(finish: str | None = None, **delta: Any) -> list[Any]:
        return [{"index": 0, "delta": delta, "finish_reason": finish}]

    usage = {"prompt_tokens": 3, "completion_tokens": 1, "total_tokens": 4}

    async def chat() -> AsyncIterator[str]:
        yield chunk(choices=choice(role="assistant", content=""), usage=usage)
        yield chunk(choices=choice(content="event: message_stop"), usage=usage)
        yield chunk(choices=choice("stop", content="."), usage=usage)
        yield chunk(choices=[], usage=usage)
        yield "data: [DONE]\n\n"

    events = [event.encode() async for event in to_message_events(make_serving(), chat())]
    assert events[0].startswith(b"event: message_start\n")
    assert [is_end(event) for event in events] == [False] * (len(events) - 1) + [True]


def test_a_lost_stream_ends_with_an_event_that_anthropics_clients_know() -> None:
    name, data = error_event("engine_lost", "gone", "messages").decode().rstrip().split("\n")
    assert name == "event: error"
    assert json.loads(data.removeprefix("data: ")) == {
        "type": "error",
        "error": {"type": "engine_lost", "message": "gone"},
    }
