"""Fields that the ingress reads from a request, and headers that it adds to its calls of engines."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, Field

from eldr_serve.engine.keys import SIGNATURE
from eldr_serve.engine.protocol import several_prompts
from eldr_serve.experts.signature import unpack_counts

# Our own key in `kv_transfer_params`, which engines ignore.
REPLICA = "eldr_replica"  # the replica that a call through a Serve handle must go to
# Sent at the end of a `generate` call: the engine's return value, see protocol.Engine.
WAITED_S = "waited_s"
WARM = "warm-"  # prefix of the ids of warm-up calls

_CREATED = re.compile(rb'"created":(\d+)')


class Asked(BaseModel):
    """Request fields that placement and splitting depend on; the engine validates the whole body."""

    model: str | None = None
    stream: bool | None = False
    prompt: Any = None
    prompt_embeds: Any = None
    messages: Any = None
    n: int | None = None
    best_of: int | None = None
    use_beam_search: bool | None = False
    prompt_logprobs: int | None = None
    echo: bool | None = False
    logprobs: int | bool | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    cache_salt: str | None = Field(default=None, min_length=1)


@dataclass(frozen=True)
class Generation:
    """A request for generated text."""

    method: str  # "chat" or "completions"
    body: bytes  # JSON, as the client sent it
    asked: Asked
    headers: dict[str, str] = field(default_factory=dict)
    domain: str | None = None  # kind of request as named by the client, for policy `domain`
    tenant: str = ""
    priority: float = 1.0  # of the tenant
    cache_salt: str = ""  # see tenant_salt


def transfer_params(request: Any) -> dict[str, Any]:
    """Return the request's `kv_transfer_params`; empty if they are missing or not a dict."""
    params = getattr(request, "kv_transfer_params", None)
    return params if isinstance(params, dict) else {}


def signature_of(params: dict[str, Any]) -> NDArray[np.uint32] | None:
    """Return the prompt's expert counts, uint32[L,E]; None if they are missing or malformed."""
    packed = params.get(SIGNATURE)
    if not isinstance(packed, str):
        return None
    try:
        return unpack_counts(packed)
    except ValueError:
        return None


def sequences(asked: Asked) -> int:
    """Return the number of requested answers: prompts x n; vLLM does not read `best_of`."""
    prompts = len(asked.prompt) if several_prompts(asked.prompt) else 1
    if isinstance(asked.prompt_embeds, list):
        prompts += len(asked.prompt_embeds)
    return max(prompts, 1) * max(asked.n or 1, 1)


def needs_whole_engine(method: str, asked: Asked) -> str | None:
    """Return why the request cannot be split between two engines, or None if it can.

    Several sequences of one request would read the same prompt blocks, which the prefill engine frees after
    the first read. Log-probabilities of the prompt need the prompt's logits.
    """
    if (asked.n or 1) > 1:
        return "n>1"
    if asked.best_of not in (None, 1):
        return "best_of>1"
    if asked.use_beam_search:
        return "beam-search"
    if asked.prompt_logprobs is not None:
        return "prompt-logprobs"
    if method == "completions":
        if several_prompts(asked.prompt):
            return "several-prompts"
        if asked.prompt is None:
            return "prompt-embeddings"
        if asked.echo and asked.logprobs is not None:
            return "echo-logprobs"
    return None


def tenant_salt(tenant: str, asked: Asked) -> str:
    """Return a cache salt that isolates a named tenant's prefixes; "" without a name.

    A client's own salt isolates its users within the tenant.
    """
    if not tenant:
        return ""
    return hashlib.sha256(json.dumps([tenant, asked.cache_salt]).encode()).hexdigest()


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

    `params` and `token_ids` are those that prefill returned. The signature is sent apart from `params`, which
    the engine's core gets; it is needed for a sample of the request.

    The answer continues after `generated` (uint32 ids); `created` is the timestamp of chunks already sent.
    """
    passed = {key: value for key, value in (params or {}).items() if key != SIGNATURE}
    return {
        "method": method, "id": request_id, "kv": passed, "token_ids": token_ids, "headers": headers or {},
        "cache_salt": cache_salt, "generated": generated, "created": created,
        "domain": domain or "", "signature": (params or {}).get(SIGNATURE) or "",
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


def prompt_key(asked: Asked) -> str:
    """Return a key that depends only on the prompt, not on other fields."""
    prompt = asked.messages if asked.prompt is None else asked.prompt
    return hashlib.blake2b(repr(prompt).encode(errors="surrogatepass"), digest_size=16).hexdigest()


def prompt_head(asked: Asked, prefix_tokens: int = 64) -> bytes:
    """Return the input of the prefix hash: the first tokens, or 4 characters of text for each."""
    prompt = asked.prompt
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], int):
        return repr(prompt[:prefix_tokens]).encode()
    if isinstance(prompt, list) and prompt:
        prompt = prompt[0]
    if prompt is None and isinstance(asked.messages, list):
        prompt = "\n".join(
            f"{message.get('role')}:{message.get('content')}"
            for message in asked.messages
            if isinstance(message, dict)
        )
    return str(prompt)[: 4 * prefix_tokens].encode(errors="surrogatepass")


def max_new_tokens(request: Any) -> int:
    """Return the maximum number of tokens in the answer; 0 if the request has no limit."""
    asked = getattr(request, "max_completion_tokens", None) or getattr(request, "max_tokens", None)
    return asked if isinstance(asked, int) else 0
