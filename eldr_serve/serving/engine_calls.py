"""What an engine replica does for calls that come through its channel."""

from __future__ import annotations

import copy
import logging
from collections.abc import AsyncGenerator
from typing import Any

import msgspec
import numpy as np
import pydantic_core
from pydantic import TypeAdapter, ValidationError

from eldr_serve.channel import Answer, CallFailed
from eldr_serve.serving.compat import (
    ENDPOINT_REQUESTS,
    ChatCompletionRequest,
    CompletionRequest,
    RawRequestInfo,
    canonical_request_id,
    create_error_response,
    openai_serving,
    picklable_chat,
)
from eldr_serve.serving.errors import Refused, error_body, sentence
from eldr_serve.serving.first_token import first_token
from eldr_serve.serving.plain_stream import PlainStream, is_plain

logger = logging.getLogger(__name__)

_MAX_PATTERN_TOKENS = 1024

_REQUESTS: dict[str, TypeAdapter[Any]] = {
    method: TypeAdapter(request)
    for method, request in {
        "chat": ChatCompletionRequest,
        "completions": CompletionRequest,
        **ENDPOINT_REQUESTS,
    }.items()
}


def describe(error: Exception) -> tuple[int, bytes]:
    """An exception's status, as of HTTP, and the body that tells it to the client."""
    if isinstance(error, CallFailed):
        return error.status, error.body
    if isinstance(error, Refused):
        return error.status, error_body(str(error), error.status)
    if isinstance(error, ValidationError):
        return 400, error_body(sentence(error), 400)
    said = create_error_response(error).error
    if said.code >= 500:
        logger.error("a call failed", exc_info=error)
    return said.code, error_body(sentence(error), said.code)


def parse_request(method: str, header: dict[str, Any], body: bytes) -> Any:
    """The request that a call carries, for vLLM; valid in all its parts.

    vLLM's own validators stumble over values of other types than they expect, and leave the parts of a
    chat's messages to be validated when they are first looked at.

    Raises:
        Refused: 400, one sentence.
    """
    fields = pydantic_core.from_json(body)
    if not isinstance(fields, dict):
        raise Refused("the body must be a JSON object", status=400)
    fields |= {"kv_transfer_params": None, "ec_transfer_params": None}  # clients name no engines to read from
    try:
        request = _REQUESTS[method].validate_python(fields)
    except ValidationError:
        raise  # it says where
    except Exception as error:
        raise Refused(sentence(error), status=400) from error
    ours = {"request_id": header.get("id"), "kv_transfer_params": header.get("kv")}
    known = type(request).model_fields
    request = request.model_copy(
        update={name: value for name, value in ours.items() if name in known and value}
    )
    detection = getattr(request, "repetition_detection", None)
    if detection is not None and detection.max_pattern_size > _MAX_PATTERN_TOKENS:
        # vLLM's scheduler tries each size at each token, before all other requests go on.
        raise Refused(f"repetition_detection.max_pattern_size is at most {_MAX_PATTERN_TOKENS}", status=400)
    return _sound_messages(request) if "messages" in known else request


def _sound_messages(request: Any) -> Any:
    try:
        request = picklable_chat(request)
        roles = [message.get("role") for message in request.messages]
    except Exception as error:
        raise Refused(f"a message is malformed: {sentence(error.__cause__ or error)}", status=400) from error
    if not all(isinstance(role, str) for role in roles):
        raise Refused("each message needs a role", status=400)
    return request


async def prefill_once(engine: Any, header: dict[str, Any], body: bytes) -> Any:
    """vLLM's output for the prompt of a prefill call, see first_token."""
    request = parse_request(header["method"], header, body)
    return await first_token(engine, header["method"], request, _raw_request(request, header))


async def prefill(engine: Any, header: dict[str, Any], body: bytes, answer: Answer) -> None:
    """Fill the KV cache; send what decode and placement need, as msgpack.

    The answer: `tokens` (of the prompt), `token_ids` (uint32 bytes), `kv` (the transfer parameters).
    """
    last = await prefill_once(engine, header, body)
    ids = last.prompt_token_ids
    found = {
        "tokens": len(ids),
        "token_ids": np.asarray(ids, np.uint32).tobytes(),
        "kv": last.kv_transfer_params or {},
    }
    answer.send(msgspec.msgpack.encode(found), 1)


async def generate(engine: Any, header: dict[str, Any], body: bytes, answer: Answer) -> None:
    """Send the answer: the bytes of a stream, or of a whole response.

    `header["token_ids"]` (uint32 bytes), if any, is the prompt as prefill's tokeniser and template made it.
    """
    method = header["method"]
    request = parse_request(method, header, body)
    if header.get("token_ids"):
        _set_prompt(request, np.frombuffer(header["token_ids"], np.uint32).tolist())
    serving, create = openai_serving(engine, method)
    plain = None
    if request.stream and is_plain(serving, request):
        serving = copy.copy(serving)
        name = "chat_completion_stream_generator" if method == "chat" else "completion_stream_generator"
        plain = PlainStream(getattr(serving, name), answer.send)
        setattr(serving, name, plain)
    made = await getattr(serving, create)(request, _raw_request(request, header))
    if not isinstance(made, AsyncGenerator):
        _send_whole(made, answer)
        return
    begun = False
    async for chunk in made:
        if not begun and chunk.startswith('data: {"error"'):
            _refuse_streamed(chunk)
        begun = True
        answer.send(chunk.encode(), plain.tokens() if plain else generated_tokens(chunk))


async def other(server: Any, method: str, header: dict[str, Any], body: bytes, answer: Answer) -> None:
    """One of the endpoints that generate nothing, by Ray's server of the engine."""
    request = parse_request(method, header, body)
    info = RawRequestInfo(headers=header.get("headers") or {})
    async for made in await getattr(server, method)(request, info):
        _send_whole(made, answer)


def _raw_request(request: Any, header: dict[str, Any]) -> Any:
    info = canonical_request_id(request, RawRequestInfo(headers=header.get("headers") or {}))
    return RawRequestInfo.to_starlette_request_optional(info)


def _set_prompt(request: Any, ids: list[int]) -> None:
    """Have the prompt not made of text again, where nothing of the answer needs its text."""
    if request.echo:
        return
    if isinstance(request, CompletionRequest):
        if request.suffix is None:
            request.prompt, request.add_special_tokens, request.truncate_prompt_tokens = ids, False, None
    elif not request.return_prompt_text:
        request.kv_transfer_params = {**(request.kv_transfer_params or {}), "prompt_token_ids": ids}


def _send_whole(made: Any, answer: Answer) -> None:
    """A response of vLLM or Ray; CallFailed if it is an error."""
    error = getattr(made, "error", None)
    body = made.model_dump_json().encode()
    if error is not None:
        raise CallFailed(int(error.code), body)
    tokens = getattr(getattr(made, "usage", None), "completion_tokens", None)
    answer.send(body, int(tokens or 0))


def _refuse_streamed(chunk: str) -> None:
    body = chunk.removeprefix("data: ").strip().encode()
    try:
        code = int(pydantic_core.from_json(body)["error"].get("code") or 500)
    except (ValueError, KeyError, TypeError, AttributeError):
        code = 500
    raise CallFailed(code, body)


def generated_tokens(chunk: str) -> int:
    """Tokens in an event of vLLM's stream.

    An event carries one token. The event that opens a chat (it alone names a role), usage and `[DONE]`
    carry none. Nothing is parsed: quotes within generated text are escaped, so that they do not match.
    """
    return 0 if '"role":' in chunk else chunk.count('"choices":[{')
