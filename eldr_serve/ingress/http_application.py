"""The HTTP application of an ingress replica: routes and error responses."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from ray import serve
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route

from eldr_serve.channel import CallFailed, ChannelLost
from eldr_serve.dashboard import SELF_CONTAINED, live_page
from eldr_serve.errors import Refused, sentence
from eldr_serve.ingress.admin_endpoints import AdminEndpoints
from eldr_serve.ingress.admission import Admission
from eldr_serve.ingress.openai_endpoints import OpenAIEndpoints
from eldr_serve.ingress.responses import refusal, refused_response

_GROUPS: dict[str, type] = {"openai": OpenAIEndpoints, "admin": AdminEndpoints}


def application() -> Starlette:
    """Return the HTTP application of the ingress replica that runs in this process."""

    def replica() -> Any:  # an EldrIngress
        return serve.get_replica_context().servable_object

    def endpoint(group: str, name: str, *args: str) -> Callable[[Request], Awaitable[Response]]:
        async def answer(request: Request) -> Response:
            response: Response = await getattr(getattr(replica(), group), name)(*args, request)
            return response

        answer.__doc__ = getattr(_GROUPS[group], name).__doc__  # shown in the API reference
        return answer

    async def page(request: Request) -> Response:
        return HTMLResponse(live_page(), headers={"Content-Security-Policy": SELF_CONTAINED})

    posted = {
        "/v1/chat/completions": endpoint("openai", "generate", "chat"),
        "/v1/completions": endpoint("openai", "generate", "completions"),
        "/v1/embeddings": endpoint("openai", "forward", "embeddings"),
        "/v1/score": endpoint("openai", "forward", "score"),
        "/tokenize": endpoint("openai", "forward", "tokenize"),
        "/detokenize": endpoint("openai", "forward", "detokenize"),
    }
    return Starlette(
        routes=[
            *(Route(path, answer, methods=["POST"]) for path, answer in posted.items()),
            Route("/v1/models", endpoint("openai", "models")),
            Route("/v1/models/{model:path}", endpoint("openai", "model")),
            Route("/openapi.json", endpoint("openai", "openapi")),
            Route("/health", endpoint("admin", "health")),
            Route("/ping", endpoint("admin", "health"), methods=["GET", "POST"]),
            Route("/version", endpoint("admin", "version")),
            Route("/metrics", endpoint("admin", "metrics")),
            Route("/eldr/status", endpoint("admin", "status")),
            Route("/eldr/ready", endpoint("admin", "ready")),
            Route("/eldr/policy", endpoint("admin", "set_policy"), methods=["PUT"]),
            Route("/eldr/shadow", endpoint("admin", "set_shadow"), methods=["PUT", "DELETE"]),
            Route("/eldr/", page),
            Route("/eldr/live", endpoint("admin", "live")),
            Route("/eldr/table", endpoint("admin", "table"), methods=["GET", "PUT"]),
            Route("/eldr/refit", endpoint("admin", "refit"), methods=["PUT"]),
            Route("/eldr/trace", endpoint("admin", "trace")),
            Route("/eldr/predictor", endpoint("admin", "swap_predictor"), methods=["PUT"]),
            Route("/eldr/experts", endpoint("admin", "place_experts"), methods=["PUT"]),
        ],
        middleware=[
            Middleware(CORSMiddleware, allow_origins=["*"], allow_methods=["*"], allow_headers=["*"]),
            Middleware(Admission, gate=lambda: replica().gate),
        ],
        exception_handlers={
            Refused: _refused,
            CallFailed: _call_failed,
            ChannelLost: _channel_lost,
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
    return _with_request_id(request, refusal(f"an engine was lost: {sentence(error)}", 503, 1))


async def _http_error(request: Request, error: Any) -> Response:
    return refusal(error.detail, error.status_code, headers=error.headers)


async def _fault(request: Request, error: Exception) -> Response:
    return _with_request_id(request, refusal("the ingress failed: see its log", 500))


def _with_request_id(request: Request, response: Response) -> Response:
    """Add the request's id, if it has one, to the headers of a response."""
    response.headers.update(getattr(request.state, "named", {}))
    return response
