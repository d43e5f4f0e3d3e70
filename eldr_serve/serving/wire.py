"""Shaping OpenAI requests for the prefill and the decode call, and the keys of ours in between."""

from __future__ import annotations

import hashlib
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from eldr_serve.engine.keys import REQUEST, SIGNATURE
from eldr_serve.serving.compat import ChatCompletionRequest, CompletionRequest
from eldr_serve.signature import unpack_counts

# Further keys of ours in `kv_transfer_params`, beside those of the engines, which ignore them.
REPLICA = "eldr_replica"  # the replica that a call must go to
ATTEMPT = "eldr_attempt"  # how many prefill replicas have failed this request

GenerationRequest: TypeAlias = Any  # ChatCompletionRequest | CompletionRequest, unknown to mypy


def transfer_params(request: Any) -> dict[str, Any]:
    """The request's `kv_transfer_params`, empty where it has none or something else in their place."""
    params = getattr(request, "kv_transfer_params", None)
    return params if isinstance(params, dict) else {}


def signature_of(params: dict[str, Any]) -> NDArray[np.uint32] | None:
    """uint32[L,E] expert counts of the prompt; None where there are none or they are malformed."""
    packed = params.get(SIGNATURE)
    if not isinstance(packed, str):
        return None
    try:
        return unpack_counts(packed)
    except ValueError:
        return None


def from_client(request: GenerationRequest) -> GenerationRequest:
    """A copy without transfer parameters: clients do not name engines to read from."""
    return _copy(request, {"kv_transfer_params": None, "ec_transfer_params": None})


def sequences(request: GenerationRequest) -> int:
    """How many answers are asked for: prompts x n; vLLM does not read `best_of`."""
    prompt, embeds = getattr(request, "prompt", None), getattr(request, "prompt_embeds", None)
    prompts = 1
    if isinstance(prompt, list) and not (prompt and isinstance(prompt[0], int)):
        prompts = len(prompt)
    if isinstance(embeds, list):
        prompts += len(embeds)
    return max(prompts, 1) * max(request.n or 1, 1)


def needs_whole_engine(request: GenerationRequest) -> str | None:
    """Why the request cannot be split between two engines, or None if it can.

    Several sequences from one request would pull the same prompt blocks, which the prefill engine
    frees after the first pull; log-probabilities of the prompt need the prompt's logits.
    """
    if (request.n or 1) > 1:
        return "n>1"
    if getattr(request, "best_of", None) not in (None, 1):
        return "best_of>1"
    if getattr(request, "use_beam_search", False):
        return "beam-search"
    if getattr(request, "prompt_logprobs", None) is not None:
        return "prompt-logprobs"
    if isinstance(request, CompletionRequest):
        prompt = request.prompt
        if isinstance(prompt, list) and not (prompt and isinstance(prompt[0], int)):
            return "several-prompts"
        if prompt is None:
            return "prompt-embeddings"
        if request.echo and request.logprobs is not None:
            return "echo-logprobs"
    return None


def prefill_request(request: GenerationRequest, request_id: str, attempt: int) -> GenerationRequest:
    """The call that fills the KV cache: the client's request, of which PrefillServer makes one token."""
    return _copy(
        request,
        {
            "request_id": request_id,
            "kv_transfer_params": {
                "do_remote_decode": True,
                "do_remote_prefill": False,
                "remote_engine_id": None,
                "remote_block_ids": None,
                "remote_host": None,
                "remote_port": None,
                REQUEST: request_id,
                ATTEMPT: attempt,
            },
        },
    )


def decode_request(
    request: GenerationRequest, request_id: str, replica: str, params: dict[str, Any] | None
) -> GenerationRequest:
    """The call that generates, addressed to `replica`; `params` as prefill returned them."""
    passed = {key: value for key, value in (params or {}).items() if key != SIGNATURE}
    return _copy(request, {"request_id": request_id, "kv_transfer_params": passed | {REPLICA: replica}})


def _copy(request: GenerationRequest, update: dict[str, Any]) -> GenerationRequest:
    known = {key: value for key, value in update.items() if key in type(request).model_fields}
    copy: GenerationRequest = request.model_copy(update=known)
    return copy


def generated_tokens(chunk: Any) -> int:
    """Tokens in what a decode engine yields: a list of events, an event of a stream, or a whole answer.

    An event carries one token. The event that opens a chat (it alone names a role), usage and `[DONE]`
    carry none. Nothing is parsed: quotes within generated text are escaped, so that they do not match.
    """
    if isinstance(chunk, list):
        return sum(map(generated_tokens, chunk))
    if isinstance(chunk, str):
        return 0 if '"role":' in chunk else chunk.count('"choices":[{')
    usage = getattr(chunk, "usage", None)
    return int(usage.completion_tokens or 0) if usage is not None else 0


def prompt_key(request: GenerationRequest) -> str:
    """Equal for equal prompts, whatever is asked about the answer."""
    prompt = request.messages if isinstance(request, ChatCompletionRequest) else request.prompt
    return hashlib.blake2b(repr(prompt).encode(errors="surrogatepass"), digest_size=16).hexdigest()


def max_new_tokens(request: GenerationRequest) -> int:
    """The most tokens that the answer may have; 0 where the request does not say."""
    asked = getattr(request, "max_completion_tokens", None) or getattr(request, "max_tokens", None)
    return asked if isinstance(asked, int) else 0
