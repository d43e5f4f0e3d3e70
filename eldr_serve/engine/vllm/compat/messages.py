"""The internal names of vLLM's Messages API (Anthropic's), which converts its requests to chat requests."""

from __future__ import annotations

import eldr_serve.engine.vllm.imports  # noqa: F401

from typing import Any

from eldr_serve.engine.vllm.compat.checked import internal_imports

with internal_imports():
    from vllm.entrypoints.anthropic.protocol import AnthropicCountTokensRequest, AnthropicMessagesRequest

__all__ = [
    "SERVING_NAMES",
    "AnthropicCountTokensRequest",
    "AnthropicMessagesRequest",
    "to_chat_request",
    "to_message",
    "to_message_events",
]

# Names of vLLM's serving object that this module uses, besides the names that a chat needs.
SERVING_NAMES = (
    "_get_disabled_thinking_effort",
    "_merge_inline_system",
    "count_tokens",
    "message_stream_converter",
    "messages_full_converter",
    "to_chat_completion_request",
)


async def to_chat_request(serving: Any, request: AnthropicMessagesRequest) -> Any:
    """Return the ChatCompletionRequest that vLLM's server makes of a request.

    Args:
        serving: vLLM's AnthropicServingMessages.

    Raises:
        ValueError: the request cannot be converted.
    """
    effort = "none"
    if request.thinking is not None and request.thinking.type == "disabled":
        effort = await serving._get_disabled_thinking_effort()
    return serving.to_chat_completion_request(
        request, merge_inline_system=serving._merge_inline_system, disabled_thinking_effort=effort
    )


def to_message(serving: Any, answer: Any) -> Any:
    """Return a chat's complete answer as a message; an error is returned unchanged."""
    return answer if getattr(answer, "error", None) is not None else serving.messages_full_converter(answer)


def to_message_events(serving: Any, stream: Any) -> Any:
    """Return the events of a message, each made from a chat's event as it arrives."""
    return serving.message_stream_converter(stream)
