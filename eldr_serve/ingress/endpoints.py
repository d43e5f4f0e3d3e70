"""The endpoints of an ingress replica: paths, handlers, and who may call them."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from eldr_serve.dashboard import SELF_CONTAINED, live_page
from eldr_serve.ingress.admin_endpoints import AdminEndpoints
from eldr_serve.ingress.admission import Gate
from eldr_serve.ingress.openai_endpoints import OpenAIEndpoints
from eldr_serve.objective import MILLISECONDS, TPOT_HEADER, TTFT_HEADER
from eldr_serve.request import DOMAIN_HEADER, LABEL_PREFIX, MAX_LABEL_CHARACTERS, MAX_LABELS


class IngressParts(Protocol):
    """The parts of an ingress replica that handle requests."""

    gate: Gate
    openai: OpenAIEndpoints
    admin: AdminEndpoints


class Audience(StrEnum):
    """The clients that may call an endpoint, each with a sentence for the OpenAPI document."""

    ANYONE = "No key is needed."
    TENANTS = "A tenant's key is needed, if keys are configured."
    OPERATORS = "The admin key is needed."


@dataclass(frozen=True)
class RequestHeader:
    """A request header that an endpoint reads.

    Attributes:
        pattern: regular expression of its values; None if any text is accepted.
    """

    name: str
    about: str
    pattern: str | None = None


_Handler = Callable[[IngressParts, Request], Awaitable[Response]]


@dataclass(frozen=True)
class Endpoint:
    """An endpoint of an ingress replica.

    Attributes:
        path: its path, in which Starlette finds the parameters.
        methods: its HTTP methods.
        handle: answers a request; its docstring is shown in the API reference.
        audience: who may call it.
        body: key of its request body among the engine's request types; None if no engine reads the body.
        headers: request headers that it reads, beside the keys.
    """

    path: str
    methods: tuple[str, ...]
    handle: _Handler
    audience: Audience = Audience.TENANTS
    body: str | None = None
    headers: tuple[RequestHeader, ...] = ()

    @property
    def documented_path(self) -> str:
        """Return the path as the OpenAPI document writes it."""
        return self.path.replace(":path}", "}")


_HEADERS_OF_GENERATION = (
    RequestHeader(TTFT_HEADER, "Objective: at most this time to the first token, ms.", MILLISECONDS),
    RequestHeader(TPOT_HEADER, "Objective: at most this mean time per further token, ms.", MILLISECONDS),
    RequestHeader(DOMAIN_HEADER, "The kind of request, for policy `domain`; percent-encoded UTF-8."),
    RequestHeader(
        f"{LABEL_PREFIX}NAME",
        f"A label for a policy of yours: percent-encoded UTF-8, at most {MAX_LABEL_CHARACTERS} characters. "
        f"At most {MAX_LABELS} names are allowed, each of 1 to 32 of a-z, 0-9 and '-'.",
    ),
    RequestHeader("traceparent", "The client's trace, which the request's spans join (W3C Trace Context)."),
)


def _generation(path: str, method: str) -> Endpoint:
    """Return an endpoint that generates text by this method of the engines."""

    @functools.wraps(OpenAIEndpoints.generate)
    async def handle(ingress: IngressParts, request: Request) -> Response:
        return await ingress.openai.generate(method, request)

    return Endpoint(path, ("POST",), handle, body=method, headers=_HEADERS_OF_GENERATION)


def _forwarding(path: str, method: str) -> Endpoint:
    """Return an endpoint that one decode engine answers by this method."""

    @functools.wraps(OpenAIEndpoints.forward)
    async def handle(ingress: IngressParts, request: Request) -> Response:
        return await ingress.openai.forward(method, request)

    return Endpoint(path, ("POST",), handle, body=method)


def _openai(handler: Callable[[OpenAIEndpoints, Request], Awaitable[Response]]) -> _Handler:
    @functools.wraps(handler)
    async def handle(ingress: IngressParts, request: Request) -> Response:
        return await handler(ingress.openai, request)

    return handle


def _admin(handler: Callable[[AdminEndpoints, Request], Awaitable[Response]]) -> _Handler:
    @functools.wraps(handler)
    async def handle(ingress: IngressParts, request: Request) -> Response:
        return await handler(ingress.admin, request)

    return handle


def _operation(path: str, handler: Callable[[AdminEndpoints, Request], Awaitable[Response]]) -> Endpoint:
    """Return an endpoint that changes the service."""
    return Endpoint(path, ("PUT",), _admin(handler), Audience.OPERATORS)


async def _page(ingress: IngressParts, request: Request) -> Response:
    """Return the live page."""
    return HTMLResponse(live_page(), headers={"Content-Security-Policy": SELF_CONTAINED})


_GET = ("GET",)
ENDPOINTS: tuple[Endpoint, ...] = (
    _generation("/v1/chat/completions", "chat"),
    _generation("/v1/completions", "completions"),
    _generation("/v1/responses", "responses"),
    _generation("/v1/messages", "messages"),
    _forwarding("/v1/messages/count_tokens", "count_tokens"),
    _forwarding("/v1/embeddings", "embeddings"),
    _forwarding("/v1/score", "score"),
    _forwarding("/score", "score"),
    _forwarding("/v1/rerank", "rerank"),
    _forwarding("/v2/rerank", "rerank"),
    _forwarding("/rerank", "rerank"),
    _forwarding("/tokenize", "tokenize"),
    _forwarding("/detokenize", "detokenize"),
    Endpoint("/v1/models", _GET, _openai(OpenAIEndpoints.models)),
    Endpoint("/v1/models/{model:path}", _GET, _openai(OpenAIEndpoints.model)),
    Endpoint("/openapi.json", _GET, _openai(OpenAIEndpoints.openapi), Audience.ANYONE),
    Endpoint("/health", _GET, _admin(AdminEndpoints.health), Audience.ANYONE),
    Endpoint("/ping", ("GET", "POST"), _admin(AdminEndpoints.health), Audience.ANYONE),
    Endpoint("/version", _GET, _admin(AdminEndpoints.version), Audience.ANYONE),
    Endpoint("/metrics", _GET, _admin(AdminEndpoints.metrics), Audience.ANYONE),
    Endpoint("/eldr/status", _GET, _admin(AdminEndpoints.status), Audience.ANYONE),
    Endpoint("/eldr/ready", _GET, _admin(AdminEndpoints.ready), Audience.ANYONE),
    Endpoint("/eldr/", _GET, _page, Audience.ANYONE),
    Endpoint("/eldr/live", _GET, _admin(AdminEndpoints.live), Audience.OPERATORS),
    Endpoint("/eldr/trace", _GET, _admin(AdminEndpoints.trace), Audience.OPERATORS),
    Endpoint("/eldr/table", ("GET", "PUT"), _admin(AdminEndpoints.table), Audience.OPERATORS),
    Endpoint("/eldr/shadow", ("PUT", "DELETE"), _admin(AdminEndpoints.set_shadow), Audience.OPERATORS),
    _operation("/eldr/policy", AdminEndpoints.set_policy),
    _operation("/eldr/refit", AdminEndpoints.refit),
    _operation("/eldr/predictor", AdminEndpoints.swap_predictor),
    _operation("/eldr/experts", AdminEndpoints.place_experts),
    _operation("/eldr/drain", AdminEndpoints.drain),
)
PUBLIC_PATHS = frozenset(endpoint.path for endpoint in ENDPOINTS if endpoint.audience is Audience.ANYONE)
