"""Give answers of vLLM's serving objects the form of each API."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

from eldr_serve.engine.vllm.compat.messages import to_message, to_message_events
from eldr_serve.engine.vllm.compat.responses import to_response_events

# How vLLM's server serializes the answers of a method, if not by default.
_SERIALIZED: dict[str, dict[str, bool]] = {
    "messages": {"exclude_none": True},
    "count_tokens": {"exclude_none": True},
    "responses": {"by_alias": True},
}


def to_events(method: str, serving: Any, answer: Any) -> AsyncGenerator[str, None]:
    """Return the events of a stream as vLLM's server sends them.

    Args:
        method: "chat", "completions", "messages" or "responses".
        serving: vLLM's serving object.
        answer: its stream.
    """
    if method == "messages":
        answer = to_message_events(serving, answer)
    elif method == "responses":
        answer = to_response_events(answer)
    stream: AsyncGenerator[str, None] = answer
    return stream


def to_whole_answer(method: str, serving: Any, answer: Any) -> Any:
    """Return an answer that is not streamed, as the model that vLLM's server serializes."""
    return to_message(serving, answer) if method == "messages" else answer


def to_json(method: str, answer: Any) -> bytes:
    """Serialize an answer as vLLM's server does."""
    serialized: str = answer.model_dump_json(**_SERIALIZED.get(method, {}))
    return serialized.encode()
