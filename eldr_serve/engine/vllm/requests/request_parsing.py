"""Parsers of clients' requests into the types of vLLM's and Ray's endpoints, in a replica."""

from __future__ import annotations

from typing import Any

import pydantic_core
from pydantic import TypeAdapter, ValidationError

from eldr_serve.engine.protocol import EngineRequest
from eldr_serve.engine.vllm.compat.messages import AnthropicMessagesRequest, to_chat_request
from eldr_serve.engine.vllm.compat.responses import ResponsesRequest
from eldr_serve.engine.vllm.compat.serve_llm import (
    ENDPOINT_REQUESTS,
    ChatCompletionRequest,
    CompletionRequest,
    openai_serving,
    parameter_of,
    picklable_chat,
)
from eldr_serve.errors import RequestRefusedError, one_line_message

_MAX_PATTERN_TOKENS = 1024

REQUESTS: dict[str, Any] = {  # the request type of each method
    "chat": ChatCompletionRequest,
    "completions": CompletionRequest,
    "messages": AnthropicMessagesRequest,
    "responses": ResponsesRequest,
    **ENDPOINT_REQUESTS,
}
_VALIDATORS: dict[str, TypeAdapter[Any]] = {
    method: TypeAdapter(request) for method, request in REQUESTS.items()
}


def parse_request(engine_request: EngineRequest) -> Any:
    """Return the request as an instance of vLLM's model, completely validated.

    vLLM's own validators fail on values of unexpected types, and validate the parts of a chat's messages
    only when these are first read.

    Raises:
        RequestRefusedError: the request is invalid; the status is 400.
        ValidationError: a field is invalid; the error has its location.
    """
    fields = pydantic_core.from_json(engine_request.body)
    if not isinstance(fields, dict):
        raise RequestRefusedError("the body must be a JSON object", status=400)
    fields |= {"kv_transfer_params": None, "ec_transfer_params": None}  # clients may not set these
    if engine_request.cache_salt:
        fields |= {"cache_salt": engine_request.cache_salt, "priority": 0}
    try:
        request = _VALIDATORS[engine_request.method].validate_python(fields)
    except ValidationError:
        raise
    except Exception as error:
        raise RequestRefusedError(one_line_message(error), status=400, param=parameter_of(error)) from error
    if isinstance(request, ResponsesRequest):
        _refuse_stored_responses(request)
    prefix = "resp_" if engine_request.id and engine_request.method == "responses" else ""
    own_fields = {
        "request_id": f"{prefix}{engine_request.id}",
        "kv_transfer_params": engine_request.kv_transfer_params,
    }
    field_names = type(request).model_fields
    request = request.model_copy(
        update={name: value for name, value in own_fields.items() if name in field_names and value}
    )
    _refuse_harm_to_batch(request)
    is_chat = "messages" in field_names and engine_request.method not in ("messages", "count_tokens")
    return _validate_messages(request) if is_chat else request


async def parse_generation(engine_request: EngineRequest, engine: Any) -> Any:
    """Return a request for generated text as a ChatCompletionRequest or CompletionRequest.

    Args:
        engine: Ray's VLLMEngine.

    Raises:
        RequestRefusedError, ValidationError: see parse_request.
    """
    request = parse_request(engine_request)
    if engine_request.method != "messages":
        return request
    serving, _ = openai_serving(engine, engine_request.method)
    try:
        chat = await to_chat_request(serving, request)
    except ValidationError:
        raise
    except Exception as error:
        raise RequestRefusedError(one_line_message(error), status=400, param=parameter_of(error)) from error
    if engine_request.id:
        chat = chat.model_copy(update={"request_id": engine_request.id})
    return _validate_messages(chat)


def _refuse_harm_to_batch(request: Any) -> None:
    """Refuse a field with which vLLM would spoil or delay the other requests of a batch."""
    if getattr(request, "logprob_token_ids", None):
        # vLLM pads the log-probabilities of all requests of the batch to these tokens.
        raise RequestRefusedError(
            "logprob_token_ids is not supported, because vLLM would replace the log-probabilities of other "
            "requests: use logprobs or top_logprobs",
            status=400,
            param="logprob_token_ids",
        )
    detection = getattr(request, "repetition_detection", None)
    if detection is not None and detection.max_pattern_size > _MAX_PATTERN_TOKENS:
        # At each token vLLM's scheduler tries each size, which delays all other requests.
        size = detection.max_pattern_size
        raise RequestRefusedError(
            f"repetition_detection.max_pattern_size must be at most {_MAX_PATTERN_TOKENS}, got {size}",
            status=400,
            param="repetition_detection",
        )


def _refuse_stored_responses(request: ResponsesRequest) -> None:
    """Refuse a request that needs stored responses, which vLLM keeps in the memory of one engine."""
    for name in ("background", "previous_response_id"):
        if getattr(request, name):
            raise RequestRefusedError(
                f"{name} is not supported, because responses are not stored: send the whole conversation as "
                "input",
                status=400,
                param=name,
            )


def _validate_messages(request: Any) -> Any:
    try:
        request = picklable_chat(request)
        roles = [message.get("role") for message in request.messages]
    except Exception as error:
        raise RequestRefusedError(
            f"a message is malformed: {one_line_message(error.__cause__ or error)}", status=400
        ) from error
    if not all(isinstance(role, str) for role in roles):
        raise RequestRefusedError("each message needs a role", status=400)
    return request


def set_prompt(request: Any, ids: list[int]) -> None:
    """Replace the request's prompt by token ids, unless the answer needs the prompt's text."""
    if request.echo:
        return
    if isinstance(request, CompletionRequest):
        if request.suffix is None:
            request.prompt, request.add_special_tokens, request.truncate_prompt_tokens = ids, False, None
    elif not request.return_prompt_text:
        request.kv_transfer_params = {**(request.kv_transfer_params or {}), "prompt_token_ids": ids}
