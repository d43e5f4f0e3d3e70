"""The ingress's real HTTP application in this process, over fake engines and a fake router actor."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import cache
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import httpx
from one_path import Deployment, answering, good_prefill
from ray import serve
from ray.serve.llm.ingress import make_fastapi_ingress
from router_talk import FakeActor

from eldr_serve.serving import ingress
from eldr_serve.serving.admission import IngressOptions
from eldr_serve.serving.compat import CompletionResponse
from eldr_serve.serving.path import PathOptions
from eldr_serve.serving.router_settings import RouterSettings

KEY = "key"
_names = itertools.count()


@cache
def _ingress_class() -> Any:
    cls = make_fastapi_ingress(ingress.EldrIngress, endpoint_map=ingress.ENDPOINTS, app=ingress.application())
    cls.__del__ = lambda self: None  # Serve's is asynchronous, and awaited by Serve alone
    return cls


CHOICE = {"index": 0, "text": "yes", "finish_reason": "length"}
USAGE = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
answers = answering(CompletionResponse(model="m", choices=[CHOICE], usage=USAGE))


class App:
    """A running ingress and a client of it."""

    def __init__(self, running: Any, client: httpx.AsyncClient, *handles: Deployment) -> None:
        self.ingress, self.client = running, client
        self.prefill, self.decode = handles

    async def post(self, path: str, body: Any) -> httpx.Response:
        """The body is JSON text, or what is made JSON of."""
        content = body if isinstance(body, str | bytes) else json.dumps(body)
        return await self.client.post(path, content=content, headers={"content-type": "application/json"})

    async def put(self, path: str, key: str | None = KEY, **body: Any) -> httpx.Response:
        """By an operator with this key."""
        return await self.client.put(path, headers={"authorization": f"Bearer {key}"} if key else {}, **body)

    async def status(self) -> dict[str, Any]:
        return (await self.client.get("/eldr/status")).json()


@asynccontextmanager
async def running_app(
    *,
    prefill: Callable[[Any], AsyncIterator[Any]] = good_prefill,
    decode: Callable[[Any], AsyncIterator[Any]] = answers,
    actor: FakeActor | None = None,
    admin_key: str | None = KEY,
    **options: Any,
) -> AsyncIterator[App]:
    """Options are those of IngressOptions."""
    actor = actor or FakeActor()
    handles = Deployment(prefill), Deployment(decode)
    name = f"test-{next(_names)}"
    running: Any = object.__new__(_ingress_class())
    context = SimpleNamespace(servable_object=running)
    with (
        patch.object(ingress, "connect", lambda *_: actor),
        patch.object(serve, "get_replica_context", lambda: context),
    ):
        await running.__init__(
            {"m": handles[1]},
            {"m": {"id": "m", "object": "model", "owned_by": "", "permission": [], "metadata": {}}},
            prefill=handles[0],
            application=name,
            router=RouterSettings(model_id="m"),
            options=IngressOptions(**options),
            path_options=PathOptions(retry_backoff_s=0.0),
            admin_key_sha256=hashlib.sha256(admin_key.encode()).hexdigest() if admin_key else None,
        )
        ingress.directory(ingress.decode_directory(name)).publish(["r0", "r1"])
        transport = httpx.ASGITransport(running.app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://test", timeout=10) as client:
            try:
                yield App(running, client, *handles)
            finally:
                await running._client.stop()
