"""Readers of engines' replies, bodies of warm-up calls, and the keys of `kv_transfer_params`.

Ingresses, replicas and engine cores share this module, which imports no engine software.
"""

from __future__ import annotations

import json
import re
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from eldr_serve.experts.signature import unpack_counts

# Keys that EldrConnector reads or writes in `kv_transfer_params`.
EXPERT_COUNTS_KEY = "eldr_expert_counts"  # packed expert counts of the prompt, in the reply to a prefill call
REQUEST_KEY = "eldr_request"  # the caller's name of a prompt, to abandon its blocks or to get its counts
CREATED_TOKENS_KEY = "eldr_created_cache_tokens"  # tokens added to the prefix cache, in a prefill reply
CALIBRATE_KEY = "eldr_calibrate"  # calls with it get decode counts, and prefill counts if the engine prefills
ROUTES_KEY = "eldr_routes"  # calls with this key and CALIBRATE_KEY also get packed routes, under it
# Other keys of a calibration answer.
PREFILL_COUNTS_KEY = "eldr_prefill"  # packed expert counts of the prompt
DECODE_COUNTS_KEY = "eldr_decode"  # packed expert counts of the decode steps
DECODE_STEPS_KEY = "eldr_decode_steps"  # number of decode steps
# Key that engines ignore: the replica that a call through a Serve handle must go to.
REPLICA_KEY = "eldr_replica"
# Headers that steer an engine. The ingress drops those that a client sends.
STEERING_HEADERS = frozenset({"x-vllm-priority"})
WARM_UP_ID_PREFIX = "warm-"  # prefix of the ids of warm-up calls

_LAST_EVENTS = (b"event: message_stop\n", b"event: response.completed\n")
_CREATED = re.compile(rb'"created":(\d+)')


class GenerationReport(msgspec.Struct, frozen=True, omit_defaults=True):
    """An engine's report at the end of a `generate` call; a value is None if it is unknown.

    Attributes:
        transport_s: seconds from the call to the first step of the request, including a transfer of its
            prompt's blocks from another engine.
        cached_tokens: number of tokens that the prefix cache held of the prompt, and of the answer if the
            call continues one.
    """

    transport_s: float | None = None
    cached_tokens: float | None = None


class PrefillReply(msgspec.Struct, frozen=True):
    """The reply to a prefill call, with the values of `protocol.PrefilledPrompt`.

    Attributes:
        token_ids: uint32[T] as bytes.
        kv_transfer_params: see PrefilledPrompt.
    """

    token_ids: bytes
    kv_transfer_params: dict[str, Any]


def kv_transfer_params_of(request: Any) -> dict[str, Any]:
    """Return the request's `kv_transfer_params`; empty if they are missing or not a dict."""
    params = getattr(request, "kv_transfer_params", None)
    return params if isinstance(params, dict) else {}


def expert_counts_of(params: dict[str, Any]) -> NDArray[np.uint32] | None:
    """Return the prompt's expert counts, uint32[L,E]; None if they are missing or malformed."""
    packed = params.get(EXPERT_COUNTS_KEY)
    if not isinstance(packed, str):
        return None
    try:
        return unpack_counts(packed)
    except ValueError:
        return None


def split_expert_counts(params: dict[str, Any] | None) -> tuple[dict[str, Any], str]:
    """Return `kv_transfer_params` without the packed expert counts, and these counts.

    A decode call sends the counts separately, since a request's sample needs them and the engine
    core does not.
    """
    params = dict(params or {})
    return params, params.pop(EXPERT_COUNTS_KEY, None) or ""


def created_at(chunk: bytes) -> int | None:
    """Return the timestamp in a stream's first chunk, in seconds since 1970; None if there is none.

    Quotes in generated text are escaped, so text cannot look like the timestamp.
    """
    match = _CREATED.search(chunk)
    return int(match[1]) if match else None


def error_event(kind: str, message: str, method: str = "chat") -> bytes:
    """Return the final bytes of a stream that cannot continue."""
    if method in ("messages", "responses"):
        event = {"type": "error", "error": {"type": kind, "message": message}}
        return f"event: error\ndata: {json.dumps(event)}\n\n".encode()
    error = {"error": {"message": message, "type": kind, "code": 503}}
    return f"data: {json.dumps(error)}\n\ndata: [DONE]\n\n".encode()


def is_end(chunk: bytes) -> bool:
    """Return whether a chunk ends its stream; generated text contains no line breaks."""
    if chunk.endswith(b"data: [DONE]\n\n"):
        return True
    last = chunk.rfind(b"\n\n", 0, -2)
    return chunk.startswith(_LAST_EVENTS, 0 if last < 0 else last + 2)


def warm_up_body(model_id: str, n: int = 1) -> bytes:
    """Return a synthetic warm-up request for one random token with its log-probability."""
    return json.dumps(
        {
            "model": model_id,
            "prompt": "warm up the transfer of one block",
            "max_tokens": 1,
            "n": n,
            "temperature": 1.0,
            "logprobs": 0,
        }
    ).encode()
