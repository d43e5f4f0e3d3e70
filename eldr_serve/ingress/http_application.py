"""The HTTP application of an ingress replica: endpoints and error responses."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, cast

from ray import serve
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.middleware.errors import ServerErrorMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from eldr_serve.channel import CallFailedError, ChannelLostError
from eldr_serve.errors import RequestRefusedError, one_line_message
from eldr_serve.ingress.admission import AdmissionMiddleware, AdmittedState
from eldr_serve.ingress.endpoints import ENDPOINTS, PUBLIC_PATHS, Audience, Endpoint, IngressParts
from eldr_serve.ingress.responses import adapt_to_api, refusal, refused_response

# Response headers that scripts of other pages may read, beside those that browsers always show.
_EXPOSED_HEADERS = (
    "Retry-After",
    "x-eldr-candidates",
    "x-eldr-decode-worker",
    "x-eldr-handover-ms",
    "x-eldr-policy",
    "x-eldr-request",
    "x-eldr-trace",
    "x-request-id",
    "x-should-retry",
)


def _ingress_parts() -> IngressParts:
    return cast(IngressParts, serve.get_replica_context().servable_object)


def _route(endpoint: Endpoint) -> Route:
    """Return the route of an endpoint to the ingress replica that runs in this process.

    A route for operators checks the admin key itself, in case AdmissionMiddleware has misread the path.
    """

    @functools.wraps(endpoint.handle)
    async def handle(request: Request) -> Response:
        ingress = _ingress_parts()
        if endpoint.audience is Audience.OPERATORS:
            ingress.gate.require_admin_key(request.headers)
        return await endpoint.handle(ingress, request)

    return Route(endpoint.path, handle, methods=endpoint.methods)


def application(cors_origins: Sequence[str] = ()) -> Starlette:
    """Return the HTTP application of the ingress replica that runs in this process.

    Args:
        cors_origins: origins of the web pages whose scripts may read answers; "*" stands for all.
    """
    cors = Middleware(
        CORSMiddleware,
        allow_origins=cors_origins,
        allow_methods=["*"],
        allow_headers=["*"],
        expose_headers=_EXPOSED_HEADERS,
    )
    return Starlette(
        routes=[_route(endpoint) for endpoint in ENDPOINTS],
        middleware=[
            *([cors] if cors_origins else []),
            # Starlette runs an exception handler of Exception outside `cors`: answers would lack its headers.
            Middleware(ServerErrorMiddleware, handler=_fault),
            Middleware(AdmissionMiddleware, gate=lambda: _ingress_parts().gate, public_paths=PUBLIC_PATHS),
        ],
        exception_handlers={
            RequestRefusedError: _refused,
            CallFailedError: _call_failed,
            ChannelLostError: _channel_lost,
            HTTPException: _http_error,
        },
    )


async def _refused(request: Request, error: Any) -> Response:
    return _add_request_id(request, refused_response(error))


async def _call_failed(request: Request, error: Any) -> Response:
    retry_after = {"Retry-After": "1"} if error.status == 503 else None
    return _add_request_id(request, Response(error.body, error.status, retry_after, "application/json"))


async def _channel_lost(request: Request, error: Any) -> Response:
    return _add_request_id(request, refusal(f"an engine was lost: {one_line_message(error)}", 503, 1))


async def _http_error(request: Request, error: Any) -> Response:
    return _add_request_id(request, refusal(error.detail, error.status_code, headers=error.headers))


async def _fault(request: Request, error: Exception) -> Response:
    return _add_request_id(request, refusal("the ingress failed: see its log", 500))


def _add_request_id(request: Request, response: Response) -> Response:
    """Add the request's id, if it has one, to the headers of an error response."""
    if state := AdmittedState.find(request):
        response.headers.update(state.id_headers)
    return adapt_to_api(request.url.path, response)
