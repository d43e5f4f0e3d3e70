"""Parse clients' requests into the types of vLLM's and Ray's endpoints."""

from __future__ import annotations

from typing import Any

import pydantic_core
from pydantic import TypeAdapter, ValidationError

from eldr_serve.engine.protocol import EngineRequest
from eldr_serve.engine.vllm.compat.serve_llm import (
    ENDPOINT_REQUESTS,
    ChatCompletionRequest,
    CompletionRequest,
    parameter_of,
    picklable_chat,
)
from eldr_serve.errors import Refused, sentence

_MAX_PATTERN_TOKENS = 1024

REQUESTS: dict[str, Any] = {  # by method
    "chat": ChatCompletionRequest,
    "completions": CompletionRequest,
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
        Refused: 400, one sentence.
        ValidationError: a field is invalid; the error has its location.
    """
    fields = pydantic_core.from_json(engine_request.body)
    if not isinstance(fields, dict):
        raise Refused("the body must be a JSON object", status=400)
    fields |= {"kv_transfer_params": None, "ec_transfer_params": None}  # not for clients to set
    if engine_request.cache_salt:
        fields |= {"cache_salt": engine_request.cache_salt, "priority": 0}
    try:
        request = _VALIDATORS[engine_request.method].validate_python(fields)
    except ValidationError:
        raise
    except Exception as error:
        raise Refused(sentence(error), status=400, param=parameter_of(error)) from error
    ours = {"request_id": engine_request.id, "kv_transfer_params": engine_request.kv}
    known = type(request).model_fields
    request = request.model_copy(
        update={name: value for name, value in ours.items() if name in known and value}
    )
    detection = getattr(request, "repetition_detection", None)
    if detection is not None and detection.max_pattern_size > _MAX_PATTERN_TOKENS:
        # At each token vLLM's scheduler tries each size, which delays all other requests.
        raise Refused(f"repetition_detection.max_pattern_size is at most {_MAX_PATTERN_TOKENS}", status=400)
    return _validate_messages(request) if "messages" in known else request


def _validate_messages(request: Any) -> Any:
    try:
        request = picklable_chat(request)
        roles = [message.get("role") for message in request.messages]
    except Exception as error:
        raise Refused(f"a message is malformed: {sentence(error.__cause__ or error)}", status=400) from error
    if not all(isinstance(role, str) for role in roles):
        raise Refused("each message needs a role", status=400)
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
