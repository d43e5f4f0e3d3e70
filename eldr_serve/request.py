"""A client's request for generated text, and the fields of it that placement reads."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote

from pydantic import BaseModel, Field

from eldr_serve.errors import BadRequestError
from eldr_serve.objective import Objective
from eldr_serve.scheduling import PlacementRequest

DOMAIN_HEADER, LABEL_PREFIX = "x-eldr-domain", "x-eldr-label-"
MAX_LABELS, MAX_LABEL_CHARACTERS = 8, 128


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


@dataclass(frozen=True)
class PolicyHints:
    """A client's headers for the policy; PlacementRequest has fields of the same names.

    Attributes:
        domain: kind of request, for policy `domain`; None if the client names none.
        labels: values by name, for policies outside this project.
    """

    domain: str | None = None
    labels: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def from_headers(cls, headers: Mapping[str, str]) -> PolicyHints:
        """Return the percent-decoded values of a request's headers, whose names are in lower case.

        Raises:
            BadRequestError: there are too many labels, or the name or value of a label is invalid.
        """
        domain = headers.get(DOMAIN_HEADER)
        labels = dict(_read_label(*item) for item in headers.items() if item[0].startswith(LABEL_PREFIX))
        if len(labels) > MAX_LABELS:
            raise BadRequestError(
                f"{len(labels)} headers {LABEL_PREFIX}NAME were sent; at most {MAX_LABELS} are allowed"
            )
        return cls(None if domain is None else unquote(domain), labels)


def _read_label(header: str, value: str) -> tuple[str, str]:
    name, label = header.removeprefix(LABEL_PREFIX), unquote(value)
    if re.fullmatch("[a-z0-9-]{1,32}", name) is None:
        raise BadRequestError(
            f"the header {header[:64]!r} does not name a label: use 1 to 32 of a-z, 0-9 and '-' after "
            f"{LABEL_PREFIX}",
            param=header[:64],
        )
    if len(label) > MAX_LABEL_CHARACTERS:
        raise BadRequestError(
            f"the header {header} has {len(label)} characters; at most {MAX_LABEL_CHARACTERS} are allowed",
            param=header,
        )
    return name, label


@dataclass(frozen=True, kw_only=True)
class Request:
    """A request for generated text."""

    method: str  # "chat", "completions", "messages" or "responses"
    body: bytes  # JSON, as the client sent it
    fields: RequestFields
    adapter: str = ""  # LoRA adapter that `model` names; "" for the base model
    headers: dict[str, str] = field(default_factory=dict)
    hints: PolicyHints = field(default_factory=PolicyHints)
    tenant: str = ""
    priority: float = 1.0  # weight of the tenant in fair shares
    cache_salt: str = ""  # see tenant_salt
    objective: Objective = field(default_factory=Objective)


def has_several_prompts(prompt: Any) -> bool:
    """Return whether a completion's `prompt` is a list of prompts (even of one), not of token ids."""
    return isinstance(prompt, list) and not (bool(prompt) and isinstance(prompt[0], int))


def num_sequences(fields: RequestFields) -> int:
    """Return the number of requested answers: prompts x n; vLLM does not read `best_of`."""
    embeds = fields.prompt_embeds
    prompts = len(embeds) if isinstance(embeds, list) else 0
    if fields.prompt is not None:
        prompts += len(fields.prompt) if has_several_prompts(fields.prompt) else 1
    return max(prompts, 1) * max(fields.n or 1, 1)


def why_not_split(method: str, fields: RequestFields) -> str | None:
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
    """Return whether the ids of a prompt that was tokenised here equal the ids that its engine computes.

    The ids of a chat are not exact, since the engine's template surrounds it. Nor are the ids of an adapter's
    prompt, since the engine reports no ids of the adapter's blocks.
    """
    fields = request.fields
    return (
        request.method == "completions"
        and not request.adapter
        and fields.add_special_tokens is True
        and fields.truncate_prompt_tokens is None
    )


def tenant_salt(tenant: str, fields: RequestFields) -> str:
    """Return a cache salt that isolates a named tenant's prefixes; "" if the tenant has no name.

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


def prompt_key(fields: RequestFields, adapter: str = "") -> str:
    """Return a key that depends only on the prompt and the adapter, not on other fields."""
    prompt = conversation(fields) if fields.prompt is None else fields.prompt
    key = adapter + repr(prompt)
    return hashlib.blake2b(key.encode(errors="surrogatepass"), digest_size=16).hexdigest()


def prompt_head(fields: RequestFields, prefix_tokens: int = 64) -> bytes:
    """Return the input of the prefix hash: the first tokens, or 4 characters of text for each token.

    Only the beginning of a long conversation is formatted.
    """
    prompt = fields.prompt
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], int):
        return repr(prompt[:prefix_tokens]).encode()
    if isinstance(prompt, list) and prompt:
        prompt = prompt[0]
    messages = conversation(fields)
    is_chat = prompt is None and isinstance(messages, list)
    head, length = "", 4 * prefix_tokens
    for text in _texts_of_messages(messages) if is_chat else _texts(prompt):
        head += text[: length - len(head)]
        if len(head) == length:
            break
    return head.encode(errors="surrogatepass")


def _texts_of_messages(messages: list[Any]) -> Iterator[str]:
    for message in messages:
        if isinstance(message, dict):
            for value, end in ((message.get("role"), ":"), (message.get("content"), "\n")):
                yield from _texts(value)
                yield end


def _texts(value: Any) -> Iterator[str]:
    """Yield the keys and values of a JSON value, one after the other."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield f"{key}:"
            yield from _texts(item)
    elif isinstance(value, list):
        for item in value:
            yield from _texts(item)
            yield ","
    else:
        yield str(value)


def max_new_tokens(fields: object) -> int:
    """Return the maximum number of tokens in the answer; 0 if the request has no limit.

    A negative limit, which engines refuse, counts as no limit.

    Args:
        fields: RequestFields, or a request of vLLM, which may lack some of the fields.
    """
    names = ("max_completion_tokens", "max_tokens", "max_output_tokens")
    limit = next(filter(None, (getattr(fields, name, None) for name in names)), None)
    return max(limit, 0) if isinstance(limit, int) else 0


def make_placement_request(
    request_id: str, fields: object, hints: PolicyHints, *, prompt_tokens: int
) -> PlacementRequest:
    """Make the placement request for a client's request; fields without an argument keep their defaults.

    Args:
        fields: as for `max_new_tokens`.
    """
    return PlacementRequest(request_id, prompt_tokens, max_new_tokens(fields), **vars(hints))
