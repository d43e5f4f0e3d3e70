"""The HTTP application of an ingress replica: routes and error responses."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from ray import serve
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route

from eldr_serve.channel import CallFailedError, ChannelLostError
from eldr_serve.dashboard import SELF_CONTAINED, live_page
from eldr_serve.errors import RequestRefusedError, one_line_message
from eldr_serve.ingress.admin_endpoints import AdminEndpoints
from eldr_serve.ingress.admission import Admission
from eldr_serve.ingress.openai_endpoints import OpenAIEndpoints
from eldr_serve.ingress.responses import adapt_to_api, refusal, refused_response

_GROUPS: dict[str, type] = {"openai": OpenAIEndpoints, "admin": AdminEndpoints}


def _replica() -> Any:  # an EldrIngress
    return serve.get_replica_context().servable_object


_Endpoint = Callable[[Request], Awaitable[Response]]


def _endpoint(group: str, name: str, *args: str) -> _Endpoint:
    """Return the endpoint that calls this method of the ingress replica in this process."""

    async def handle(request: Request) -> Response:
        response: Response = await getattr(getattr(_replica(), group), name)(*args, request)
        return response

    handle.__doc__ = getattr(_GROUPS[group], name).__doc__  # shown in the API reference
    return handle


def _operators_only(name: str) -> _Endpoint:
    """Return an endpoint that checks the admin key itself, whatever Admission made of the path."""
    handle = _endpoint("admin", name)

    @functools.wraps(handle)
    async def check_key_and_handle(request: Request) -> Response:
        _replica().gate.check_key(request.headers)
        return await handle(request)

    return check_key_and_handle


async def _page(request: Request) -> Response:
    return HTMLResponse(live_page(), headers={"Content-Security-Policy": SELF_CONTAINED})


_POSTS = {
    "/v1/chat/completions": _endpoint("openai", "generate", "chat"),
    "/v1/completions": _endpoint("openai", "generate", "completions"),
    "/v1/responses": _endpoint("openai", "generate", "responses"),
    "/v1/messages": _endpoint("openai", "generate", "messages"),
    "/v1/messages/count_tokens": _endpoint("openai", "forward", "count_tokens"),
    "/v1/embeddings": _endpoint("openai", "forward", "embeddings"),
    **dict.fromkeys(("/v1/score", "/score"), _endpoint("openai", "forward", "score")),
    **dict.fromkeys(("/v1/rerank", "/v2/rerank", "/rerank"), _endpoint("openai", "forward", "rerank")),
    "/tokenize": _endpoint("openai", "forward", "tokenize"),
    "/detokenize": _endpoint("openai", "forward", "detokenize"),
}


def application(cors_origins: Sequence[str] = ()) -> Starlette:
    """Return the HTTP application of the ingress replica that runs in this process.

    Args:
        cors_origins: origins of the web pages whose scripts may read answers; "*" stands for all.
    """
    cors = Middleware(CORSMiddleware, allow_origins=cors_origins, allow_methods=["*"], allow_headers=["*"])
    return Starlette(
        routes=[
            *(Route(path, handle, methods=["POST"]) for path, handle in _POSTS.items()),
            Route("/v1/models", _endpoint("openai", "models")),
            Route("/v1/models/{model:path}", _endpoint("openai", "model")),
            Route("/openapi.json", _endpoint("openai", "openapi")),
            Route("/health", _endpoint("admin", "health")),
            Route("/ping", _endpoint("admin", "health"), methods=["GET", "POST"]),
            Route("/version", _endpoint("admin", "version")),
            Route("/metrics", _endpoint("admin", "metrics")),
            Route("/eldr/status", _endpoint("admin", "status")),
            Route("/eldr/ready", _endpoint("admin", "ready")),
            Route("/eldr/policy", _operators_only("set_policy"), methods=["PUT"]),
            Route("/eldr/shadow", _operators_only("set_shadow"), methods=["PUT", "DELETE"]),
            Route("/eldr/", _page),
            Route("/eldr/live", _operators_only("live")),
            Route("/eldr/table", _operators_only("table"), methods=["GET", "PUT"]),
            Route("/eldr/refit", _operators_only("refit"), methods=["PUT"]),
            Route("/eldr/trace", _operators_only("trace")),
            Route("/eldr/predictor", _operators_only("swap_predictor"), methods=["PUT"]),
            Route("/eldr/experts", _operators_only("place_experts"), methods=["PUT"]),
            Route("/eldr/drain", _operators_only("drain"), methods=["PUT"]),
        ],
        middleware=[
            *([cors] if cors_origins else []),
            Middleware(Admission, gate=lambda: _replica().gate),
        ],
        exception_handlers={
            RequestRefusedError: _refused,
            CallFailedError: _call_failed,
            ChannelLostError: _channel_lost,
            HTTPException: _http_error,
            Exception: _fault,
        },
    )


async def _refused(request: Request, error: Any) -> Response:
    return _with_request_id(request, refused_response(error))


async def _call_failed(request: Request, error: Any) -> Response:
    retry_after = {"Retry-After": "1"} if error.status == 503 else None
    return _with_request_id(request, Response(error.body, error.status, retry_after, "application/json"))


async def _channel_lost(request: Request, error: Any) -> Response:
    return _with_request_id(request, refusal(f"an engine was lost: {one_line_message(error)}", 503, 1))


async def _http_error(request: Request, error: Any) -> Response:
    return adapt_to_api(request.url.path, refusal(error.detail, error.status_code, headers=error.headers))


async def _fault(request: Request, error: Exception) -> Response:
    return _with_request_id(request, refusal("the ingress failed: see its log", 500))


def _with_request_id(request: Request, response: Response) -> Response:
    """Add the request's id, if it has one, to the headers of an error response."""
    response.headers.update(getattr(request.state, "id_headers", {}))
    return adapt_to_api(request.url.path, response)
