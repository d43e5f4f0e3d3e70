"""The OpenAPI document of the service, with the engine's own request types."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI

from eldr_serve.ingress.endpoints import ENDPOINTS, Endpoint


def openapi_document(requests: Mapping[str, Any]) -> dict[str, Any]:
    """Return the document as JSON types.

    Args:
        requests: the engine's request types, by method.
    """
    app = FastAPI(title="eldr-serve")
    for endpoint in ENDPOINTS:
        for method in endpoint.methods:  # one operation each, since they need different ids
            app.add_api_route(
                endpoint.documented_path,
                _no_parameters if endpoint.body is None else _takes_body(requests[endpoint.body]),
                methods=[method],
                name=endpoint.handle.__name__,
                description=f"{inspect.getdoc(endpoint.handle)}\n\n{endpoint.audience}",
                openapi_extra={"parameters": _parameters(endpoint)},
            )
    return app.openapi()


def _parameters(endpoint: Endpoint) -> list[dict[str, Any]]:
    """Return the parameters in the endpoint's path and headers, in OpenAPI's form."""
    in_path: list[dict[str, Any]] = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in re.findall(r"{(\w+)}", endpoint.documented_path)
    ]
    in_headers: list[dict[str, Any]] = [
        {
            "name": header.name,
            "in": "header",
            "description": header.about,
            "schema": {"type": "string"} | ({"pattern": f"^{header.pattern}$"} if header.pattern else {}),
        }
        for header in endpoint.headers
    ]
    return in_path + in_headers


def _takes_body(request: Any) -> Any:
    def endpoint(body: Any) -> None: ...

    endpoint.__annotations__["body"] = request
    return endpoint


def _no_parameters() -> None: ...
