"""A client's request for generated text, and those of its fields that placement reads."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote

from pydantic import BaseModel, Field

from eldr_serve.engine.protocol import has_several_prompts
from eldr_serve.objective import Objective

DOMAIN_HEADER = "x-eldr-domain"


class RequestFields(BaseModel):
    """Request fields that placement and splitting depend on; the engine validates the whole body."""

    model: str | None = None
    stream: bool | None = False
    prompt: Any = None
    prompt_embeds: Any = None
    messages: Any = None
    system: Any = None
    input: Any = None
    instructions: Any = None
    n: int | None = None
    best_of: int | None = None
    use_beam_search: bool | None = False
    prompt_logprobs: int | None = None
    echo: bool | None = False
    logprobs: int | bool | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    max_output_tokens: int | None = None
    cache_salt: str | None = Field(default=None, min_length=1)
    add_special_tokens: Any = True
    truncate_prompt_tokens: Any = None


@dataclass(frozen=True, kw_only=True)
class Request:
    """A request for generated text."""

    method: str  # "chat", "completions", "messages" or "responses"
    body: bytes  # JSON, as the client sent it
    fields: RequestFields
    headers: dict[str, str] = field(default_factory=dict)
    domain: str | None = None  # kind of request as named by the client, for policy `domain`
    tenant: str = ""
    priority: float = 1.0  # of the tenant
    cache_salt: str = ""  # see tenant_salt
    objective: Objective = field(default_factory=Objective)


def num_sequences(fields: RequestFields) -> int:
    """Return the number of requested answers: prompts x n; vLLM does not read `best_of`."""
    embeds = fields.prompt_embeds
    prompts = len(embeds) if isinstance(embeds, list) else 0
    if fields.prompt is not None:
        prompts += len(fields.prompt) if has_several_prompts(fields.prompt) else 1
    return max(prompts, 1) * max(fields.n or 1, 1)


def needs_whole_replica(method: str, fields: RequestFields) -> str | None:
    """Return why the request cannot be split between two engines, or None if it can.

    Several sequences of one request would read the same prompt blocks, which the prefill engine frees after
    the first read. Log-probabilities of the prompt need the prompt's logits.
    """
    if (fields.n or 1) > 1:
        return "n>1"
    if fields.best_of not in (None, 1):
        return "best_of>1"
    if fields.use_beam_search:
        return "beam-search"
    if fields.prompt_logprobs is not None:
        return "prompt-logprobs"
    if method == "completions":
        if has_several_prompts(fields.prompt):
            return "several-prompts"
        if fields.prompt is None or fields.prompt_embeds is not None:
            return "prompt-embeddings"
        if fields.echo and fields.logprobs is not None:
            return "echo-logprobs"
    return None


def has_exact_ids(request: Request) -> bool:
    """Return whether the ids of a prompt that was tokenised here are those that its engine computes.

    They are not for a chat, which the engine's template surrounds.
    """
    fields = request.fields
    return (
        request.method == "completions"
        and fields.add_special_tokens is True
        and fields.truncate_prompt_tokens is None
    )


def tenant_salt(tenant: str, fields: RequestFields) -> str:
    """Return a cache salt that isolates a named tenant's prefixes; "" without a name.

    A client's own salt isolates its users within the tenant.
    """
    if not tenant:
        return ""
    return hashlib.sha256(json.dumps([tenant, fields.cache_salt]).encode()).hexdigest()


def conversation(fields: RequestFields) -> Any:
    """Return the messages of a chat, of Anthropic's API or of the Responses API, the system prompt first."""
    messages, system = fields.messages, fields.system
    if messages is None and fields.input is not None:
        system = fields.instructions
        messages = fields.input
        if not isinstance(messages, list):
            messages = [{"role": "user", "content": messages}]
    if system is None or not isinstance(messages, list):
        return messages
    return [{"role": "system", "content": system}, *messages]


def prompt_key(fields: RequestFields) -> str:
    """Return a key that depends only on the prompt, not on other fields."""
    prompt = conversation(fields) if fields.prompt is None else fields.prompt
    return hashlib.blake2b(repr(prompt).encode(errors="surrogatepass"), digest_size=16).hexdigest()


def prompt_head(fields: RequestFields, prefix_tokens: int = 64) -> bytes:
    """Return the input of the prefix hash: the first tokens, or 4 characters of text for each."""
    prompt = fields.prompt
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], int):
        return repr(prompt[:prefix_tokens]).encode()
    if isinstance(prompt, list) and prompt:
        prompt = prompt[0]
    messages = conversation(fields)
    if prompt is None and isinstance(messages, list):
        prompt = "\n".join(
            f"{message.get('role')}:{message.get('content')}"
            for message in messages
            if isinstance(message, dict)
        )
    return str(prompt)[: 4 * prefix_tokens].encode(errors="surrogatepass")


def max_new_tokens(fields: RequestFields) -> int:
    """Return the maximum number of tokens in the answer; 0 if the request has no limit."""
    names = ("max_completion_tokens", "max_tokens", "max_output_tokens")  # vLLM's requests lack some of them
    limit = next(filter(None, (getattr(fields, name, None) for name in names)), None)
    return limit if isinstance(limit, int) else 0


def domain_of(headers: Mapping[str, str]) -> str | None:
    """Return the domain that the client names in a header, percent-decoded; None if it names none."""
    header = headers.get(DOMAIN_HEADER)
    return None if header is None else unquote(header)
