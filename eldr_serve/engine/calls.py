"""Calls of engines: their headers, and what their answers contain."""

from __future__ import annotations

import json
import re
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eldr_serve.engine.keys import EXPERT_COUNTS
from eldr_serve.experts.signature import unpack_counts

# Our own key in `kv_transfer_params`, which engines ignore.
REPLICA = "eldr_replica"  # the replica that a call through a Serve handle must go to
# Sent at the end of a `generate` call: the engine's return value, see protocol.Engine.
WAITED_S = "waited_s"
WARM = "warm-"  # prefix of the ids of warm-up calls


_CREATED = re.compile(rb'"created":(\d+)')


def transfer_params(request: Any) -> dict[str, Any]:
    """Return the request's `kv_transfer_params`; empty if they are missing or not a dict."""
    params = getattr(request, "kv_transfer_params", None)
    return params if isinstance(params, dict) else {}


def expert_counts_of(params: dict[str, Any]) -> NDArray[np.uint32] | None:
    """Return the prompt's expert counts, uint32[L,E]; None if they are missing or malformed."""
    packed = params.get(EXPERT_COUNTS)
    if not isinstance(packed, str):
        return None
    try:
        return unpack_counts(packed)
    except ValueError:
        return None


def prefill_header(
    method: str,
    request_id: str,
    headers: dict[str, str] | None = None,
    cache_salt: str = "",
    *,
    generated: bytes = b"",
) -> dict[str, Any]:
    """Return the header of a prefill call.

    `generated` (uint32 ids) is the part of the answer that a lost engine has generated.
    """
    return {
        "method": method, "id": request_id, "headers": headers or {}, "cache_salt": cache_salt,
        "generated": generated,
    }  # fmt: skip


def decode_header(
    method: str,
    request_id: str,
    params: dict[str, Any] | None,
    token_ids: bytes = b"",
    headers: dict[str, str] | None = None,
    cache_salt: str = "",
    *,
    generated: bytes = b"",
    created: int | None = None,
    domain: str | None = None,
) -> dict[str, Any]:
    """Return the header of a generate call.

    `params` and `token_ids` are those that prefill returned. The expert counts are sent apart from `params`,
    which the engine's core gets; a sample of the request needs them.

    The answer continues after `generated` (uint32 ids); `created` is the timestamp of chunks already sent.
    """
    passed = {key: value for key, value in (params or {}).items() if key != EXPERT_COUNTS}
    return {
        "method": method, "id": request_id, "kv": passed, "token_ids": token_ids, "headers": headers or {},
        "cache_salt": cache_salt, "generated": generated, "created": created,
        "domain": domain or "", "expert_counts": (params or {}).get(EXPERT_COUNTS) or "",
    }  # fmt: skip


def created_at(chunk: bytes) -> int | None:
    """Return the timestamp in a stream's first chunk, s since 1970; generated text has its quotes escaped."""
    found = _CREATED.search(chunk)
    return int(found[1]) if found else None


def error_event(kind: str, message: str) -> bytes:
    """Return the final bytes of a stream that cannot continue."""
    error = {"error": {"message": message, "type": kind, "code": 503}}
    return f"data: {json.dumps(error)}\n\ndata: [DONE]\n\n".encode()


def is_end(chunk: bytes) -> bool:
    """Return whether a chunk ends its stream; generated text contains no line breaks."""
    return chunk.endswith(b"data: [DONE]\n\n")


def warm_up_body(model_id: str, n: int = 1) -> bytes:
    """Return a synthetic warm-up request for one random token with its log-probability."""
    return json.dumps(
        {"model": model_id, "prompt": "warm up the transfer of one block", "max_tokens": 1, "n": n,
         "temperature": 1.0, "logprobs": 0}
    ).encode()  # fmt: skip
