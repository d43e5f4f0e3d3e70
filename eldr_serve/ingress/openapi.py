"""The OpenAPI document of the service, with the engine's own request types."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI

_PATHS = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "completions",
    "/v1/responses": "responses",
    "/v1/messages": "messages",
    "/v1/messages/count_tokens": "count_tokens",
    "/v1/embeddings": "embeddings",
    "/v1/score": "score",
    "/score": "score",
    "/v1/rerank": "rerank",
    "/v2/rerank": "rerank",
    "/rerank": "rerank",
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
    for name in ("policy", "shadow", "table", "predictor", "refit", "experts", "drain"):
        app.put(f"/eldr/{name}")(_nothing)
    app.delete("/eldr/shadow")(_nothing)
    return app.openapi()


def _endpoint(request: Any) -> Any:
    def endpoint(body: Any) -> None: ...

    endpoint.__annotations__["body"] = request
    return endpoint


def _nothing() -> None: ...
