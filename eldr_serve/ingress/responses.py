"""OpenAI-like error responses."""

from __future__ import annotations

from collections.abc import Mapping

from starlette.responses import Response

from eldr_serve.errors import Refused, error_body


def refusal(
    message: str,
    status: int,
    retry_after_s: int | None = None,
    kind: str | None = None,
    param: str | None = None,
    headers: Mapping[str, str] | None = None,
) -> Response:
    """Return an OpenAI-like error response."""
    retry_after = {"Retry-After": str(retry_after_s)} if retry_after_s is not None else {}
    body = error_body(message, status, kind, param)
    return Response(body, status, {**retry_after, **(headers or {})}, "application/json")


def refused_response(error: Refused) -> Response:
    """Return the response to a refused request."""
    return refusal(str(error), error.status, error.retry_after_s, error.kind, error.param)
