"""Answers as the vendors' clients receive them, and the differences between two of them."""

import inspect
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import anthropic
import httpx
import openai

from tests.support.vllm_cases import CHAT, COMPLETIONS
from tests.support.vllm_fields import COUNT_TOKENS, EMBEDDINGS, MESSAGES, READ, RESPONSES

# Ids, times, and a hash of the engine's configuration, which contains the transfer of KV blocks.
RANDOM = frozenset(
    {"id", "item_id", "created", "created_at", "completed_at", "signature", "system_fingerprint"}
)
_TEXTS = {"content", "text", "reasoning", "thinking", "arguments", "partial_json"}
_TOLERANCE = 1e-3  # tolerance of log-probabilities, which two engines compute in batches of other sizes


@dataclass(frozen=True)
class Refusal:
    """An answer with a status of 4xx or 5xx, or an error in a stream, which has no status."""

    status: int | None
    param: str | None

    def __str__(self) -> str:
        return f"{self.status or 'an error in the stream'} {self.param or ''}".rstrip()


class Server:
    """A server as its clients see it: the vendors' clients, and plain HTTP for endpoints without one."""

    def __init__(self, url: str, http: httpx.Client) -> None:
        self._url = url
        self._http = http

    @cached_property
    def openai(self) -> openai.OpenAI:
        """Return OpenAI's client of this server."""
        return openai.OpenAI(
            base_url=f"{self._url}/v1", api_key="none", max_retries=0, http_client=self._http
        )

    @cached_property
    def anthropic(self) -> anthropic.Anthropic:
        """Return Anthropic's client of this server."""
        return anthropic.Anthropic(base_url=self._url, api_key="none", max_retries=0)

    def ask(self, path: str, body: dict[str, Any], ignored: frozenset[str] = RANDOM) -> Any:
        """Send a request, and return its answer as JSON types without the ignored keys, or a Refusal.

        A stream's events are joined, since engines may put tokens into events differently.
        """
        if path in READ:
            return self._get(path)
        call = self._call(path)
        if call is None:
            return self._post(path, body, ignored)
        arguments = inspect.signature(call).parameters
        typed = {name: value for name, value in body.items() if name in arguments}
        extra = {name: value for name, value in body.items() if name not in arguments}
        try:
            answer = call(**typed, extra_body=extra)
            if not body.get("stream"):
                return _without(answer.model_dump(mode="json", warnings=False), ignored)
            events = [_without(event.model_dump(mode="json", warnings=False), ignored) for event in answer]
        except (openai.APIError, anthropic.APIError) as error:
            error_body = error.body if isinstance(error.body, dict) else {}
            status = getattr(error, "status_code", 200)  # Anthropic's client gives an error in a stream 200
            return Refusal(None if status == 200 else status, error_body.get("param"))
        return join_chunks(events) if path in (CHAT, COMPLETIONS) else join_events(events)

    def _call(self, path: str) -> Callable[..., Any] | None:
        """Return the method of a vendor's client for the endpoint, or None."""
        if path in (MESSAGES, COUNT_TOKENS):
            messages = self.anthropic.messages
            return messages.create if path == MESSAGES else messages.count_tokens
        calls: dict[str, Callable[..., Any]] = {
            CHAT: self.openai.chat.completions.create,
            COMPLETIONS: self.openai.completions.create,
            RESPONSES: self.openai.responses.create,
            EMBEDDINGS: self.openai.embeddings.create,
        }
        return calls.get(path)

    def _get(self, path: str) -> Any:
        if path == "/v1/models":  # the other fields of a model's card describe the server
            return {"ids": [model.id for model in self.openai.models.list()]}
        answer = self._http.get(f"{self._url}{path}")
        return {"status": answer.status_code, "text": answer.text}

    def _post(self, path: str, body: dict[str, Any], ignored: frozenset[str]) -> Any:
        answer = self._http.post(f"{self._url}{path}", json=body)
        if answer.status_code == 200:
            return _without(answer.json(), ignored)
        error = answer.json().get("error")
        return Refusal(answer.status_code, error.get("param") if isinstance(error, dict) else None)


def _without(value: Any, ignored: frozenset[str]) -> Any:
    """Return JSON types without the ignored keys."""
    if isinstance(value, dict):
        return {name: _without(item, ignored) for name, item in value.items() if name not in ignored}
    return [_without(item, ignored) for item in value] if isinstance(value, list) else value


def join_chunks(chunks: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Join the chunks of a stream of OpenAI's older endpoints into one answer."""
    answer: dict[str, Any] = {}
    for chunk in chunks:
        answer = _joined(answer, chunk, "")
    return answer


def _joined(before: Any, after: Any, name: str) -> Any:
    """Append texts and lists, join items with the same index, and replace other values but None."""
    if before is None or after is None:
        return before if after is None else after
    if isinstance(before, dict) and isinstance(after, dict):
        names = dict.fromkeys([*before, *after])
        return {key: _joined(before.get(key), after.get(key), key) for key in names}
    if isinstance(before, list) and isinstance(after, list):
        if not all(isinstance(item, dict) and "index" in item for item in [*before, *after]):
            return before + after
        by_index = {item["index"]: item for item in before}
        for item in after:
            by_index[item["index"]] = _joined(by_index.get(item["index"]), item, "")
        return [by_index[index] for index in sorted(by_index)]
    return before + after if name in _TEXTS and isinstance(before, str) else after


def join_events(events: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Join successive events of text of /v1/responses or /v1/messages."""
    joined: list[dict[str, Any]] = []
    for event in events:
        event.pop("sequence_number", None)
        last = joined[-1] if joined else None
        if last is None or last["type"] != event["type"] or "delta" not in event:
            joined.append(event)
        elif isinstance(event["delta"], str):
            last["delta"] += event["delta"]
            last["logprobs"] = (last.get("logprobs") or []) + (event.get("logprobs") or [])
        elif event["type"] == "content_block_delta":
            last["delta"] = _joined(last["delta"], event["delta"], "")
        else:
            joined.append(event)
    return joined


def differences(ours: Any, theirs: Any, place: str = "answer") -> list[str]:
    """Return where two answers differ. A missing key equals None."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        names = dict.fromkeys([*theirs, *ours])
        return [d for n in names for d in differences(ours.get(n), theirs.get(n), f"{place}.{n}")]
    if isinstance(ours, list) and isinstance(theirs, list):
        if len(ours) != len(theirs):
            return [f"{place}: {len(ours)} items instead of {len(theirs)}"]
        pairs = enumerate(zip(ours, theirs, strict=True))
        return [d for i, (a, b) in pairs for d in differences(a, b, f"{place}[{i}]")]
    if isinstance(ours, float) and isinstance(theirs, float | int):
        is_equal = math.isclose(ours, theirs, rel_tol=_TOLERANCE, abs_tol=_TOLERANCE)
    else:
        is_equal = type(ours) is type(theirs) and ours == theirs
    return [] if is_equal else [f"{place}: {ours!s:.60} instead of {theirs!s:.60}"]
