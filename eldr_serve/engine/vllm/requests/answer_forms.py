"""The forms of answers: a table of how the answers of vLLM's API methods differ."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, field
from typing import Any

from eldr_serve.engine.vllm.compat.messages import to_message, to_message_events
from eldr_serve.engine.vllm.compat.responses import to_response_events


@dataclass(frozen=True)
class AnswerForm:
    """The properties of an API method's answers.

    Attributes:
        json_options: arguments with which vLLM's server serializes an answer.
        has_plain_streams: `PlainStream` may serialize chunks of a stream.
        renders_text_alone: vLLM renders the prompt from the request's text, so token ids cannot replace it.
        has_random_ids: parts of an answer have random ids, so no other engine can continue it.
        is_lazy: a stream calls the engine's `generate` only when it is read.
    """

    json_options: Mapping[str, bool] = field(default_factory=dict)
    has_plain_streams: bool = False
    renders_text_alone: bool = False
    has_random_ids: bool = False
    is_lazy: bool = False


_FORMS = {
    "chat": AnswerForm(has_plain_streams=True),
    "completions": AnswerForm(has_plain_streams=True),
    "messages": AnswerForm({"exclude_none": True}),
    "count_tokens": AnswerForm({"exclude_none": True}),
    "responses": AnswerForm({"by_alias": True}, renders_text_alone=True, has_random_ids=True, is_lazy=True),
}
_DEFAULT_FORM = AnswerForm()


def answer_form(method: str) -> AnswerForm:
    """Return the properties of a method's answers."""
    return _FORMS.get(method, _DEFAULT_FORM)


def to_events(method: str, serving: Any, answer: Any) -> AsyncGenerator[str, None]:
    """Return the events of a stream as vLLM's server sends them.

    Args:
        method: "chat", "completions", "messages" or "responses".
        serving: vLLM's serving object.
        answer: the object's stream.
    """
    if method == "messages":
        answer = to_message_events(serving, answer)
    elif method == "responses":
        answer = to_response_events(answer)
    stream: AsyncGenerator[str, None] = answer
    return stream


def to_unstreamed_answer(method: str, serving: Any, answer: Any) -> Any:
    """Return an unstreamed answer, as the model that vLLM's server serializes."""
    return to_message(serving, answer) if method == "messages" else answer


def to_json(method: str, answer: Any) -> bytes:
    """Serialize an answer as vLLM's server does."""
    serialized: str = answer.model_dump_json(**answer_form(method).json_options)
    return serialized.encode()
