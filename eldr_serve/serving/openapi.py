"""The OpenAPI document of the service: vLLM's requests, which the ingress passes on without knowing them."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI

from eldr_serve.serving.compat import ENDPOINT_REQUESTS, ChatCompletionRequest, CompletionRequest

_PATHS: dict[str, Any] = {
    "/v1/chat/completions": ChatCompletionRequest,
    "/v1/completions": CompletionRequest,
    "/v1/embeddings": ENDPOINT_REQUESTS["embeddings"],
    "/v1/score": ENDPOINT_REQUESTS["score"],
    "/tokenize": ENDPOINT_REQUESTS["tokenize"],
    "/detokenize": ENDPOINT_REQUESTS["detokenize"],
}


def openapi_document() -> dict[str, Any]:
    """The document as JSON types."""
    app = FastAPI(title="eldr-serve")
    for path, request in _PATHS.items():
        app.post(path)(_endpoint(request))
    for path in ("/v1/models", "/eldr/status"):
        app.get(path)(_nothing)
    for path in ("/eldr/policy", "/eldr/table"):
        app.put(path)(_nothing)
    return app.openapi()


def _endpoint(request: Any) -> Any:
    def endpoint(body: Any) -> None: ...

    endpoint.__annotations__["body"] = request
    return endpoint


def _nothing() -> None: ...
