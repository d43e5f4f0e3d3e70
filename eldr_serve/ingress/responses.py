"""OpenAI-like error responses."""

from __future__ import annotations

from collections.abc import Mapping

from starlette.responses import Response

from eldr_serve.errors import EnginesLostError, RequestRefusedError, error_body

_NO_RETRY = {"x-should-retry": "false"}  # OpenAI's clients would retry a request that got 500

_MESSAGES = ("/v1/messages", "/v1/messages/count_tokens")


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


def refused_response(error: RequestRefusedError) -> Response:
    """Return the response to a refused request."""
    headers = _NO_RETRY if isinstance(error, EnginesLostError) else None
    return refusal(str(error), error.status, error.retry_after_s, error.kind, error.param, headers)


def adapt_to_api(path: str, response: Response) -> Response:
    """Give an OpenAI-like error response the form that clients of a path expect.

    Anthropic's clients need a `type` beside `error`. Of `error`, they read only `type` and `message`.
    """
    if path.endswith(_MESSAGES):
        response.body = b'{"type": "error", ' + bytes(response.body)[1:]
        response.headers["content-length"] = str(len(response.body))
    return response
