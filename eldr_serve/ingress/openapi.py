"""The OpenAPI document of the service, with the engine's own request types."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI

_PATHS = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "completions",
    "/v1/embeddings": "embeddings",
    "/v1/score": "score",
    "/tokenize": "tokenize",
    "/detokenize": "detokenize",
}


def openapi_document(requests: Mapping[str, Any]) -> dict[str, Any]:
    """Return the document as JSON types.

    Args:
        requests: the engine's request types, by method.
    """
    app = FastAPI(title="eldr-serve")
    for path, method in _PATHS.items():
        app.post(path)(_endpoint(requests[method]))
    for path in (
        "/v1/models",
        "/health",
        "/ping",
        "/version",
        "/metrics",
        "/eldr/status",
        "/eldr/ready",
        "/eldr/live",
        "/eldr/table",
        "/eldr/trace",
    ):
        app.get(path)(_nothing)
    for path in ("/eldr/policy", "/eldr/shadow", "/eldr/table", "/eldr/refit", "/eldr/experts"):
        app.put(path)(_nothing)
    return app.openapi()


def _endpoint(request: Any) -> Any:
    def endpoint(body: Any) -> None: ...

    endpoint.__annotations__["body"] = request
    return endpoint


def _nothing() -> None: ...
