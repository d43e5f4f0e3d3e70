"""The ingress's real HTTP application in this process, over fake engines and a fake router actor."""

import asyncio
import hashlib
import itertools
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock, Mock, patch

import httpx
from ray import serve

from eldr_serve.engine.protocol import EngineRequest
from eldr_serve.engine.vllm.requests.request_parsing import REQUESTS, parse_request
from eldr_serve.ingress import deployment as ingress
from eldr_serve.ingress.http_application import application
from eldr_serve.ingress.openapi import openapi_document
from eldr_serve.ingress.options import IngressOptions
from eldr_serve.pipeline.path_options import PathOptions, PrefillRouterOptions
from eldr_serve.router.settings import RouterSettings
from eldr_serve.router_client.client import RouterClient
from tests.support.fake_fleet import FakeFleet, Sent, answer_with
from tests.support.fake_router import FakeActor
from tests.support.request_path import good_prefill

KEY = "key"
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HELLO = {"model": "m", "prompt": "hello", "max_tokens": 2}
TOKEN = b'data: {"choices":[{"index":0,"text":"a"}]}\n\n'
_names = itertools.count()
_OPENAPI = openapi_document(REQUESTS)

unstreamed_answer = answer_with(b'{"choices": [{"index": 0, "text": "yes", "finish_reason": "length"}]}')
stream_answer = answer_with(TOKEN, b"data: [DONE]\n\n")


class _Ingress(ingress.EldrIngress):
    def __del__(self) -> None:
        """Replace the asynchronous destructor, which only Serve awaits."""


class App:
    """A running ingress and an HTTP client of it.

    Args:
        prefill: answers the calls of prefill engines.
        decode: answers the calls of decode engines.
        options: the ingress's options.
        validated: whether engines validate a request, as vLLM does, before they answer it.

    Attributes:
        router_client: the ingress's client of the router.
    """

    router_client: RouterClient

    def __init__(self, prefill: Any, decode: Any, options: IngressOptions, validated: bool = True) -> None:
        answers = (self._validate_first(a) if validated else a for a in (prefill, decode))
        self.prefill, self.decode = (FakeFleet(answer, "r0", "r1") for answer in answers)
        self.valid_calls: list[Sent] = []  # calls of valid requests
        self.ingress: Any = None
        self.http = application(options.cors_origins)
        self.client: Any = None

    def _validate_first(self, answer: Callable[[Sent], AsyncIterator[Any]]) -> Any:
        """Return engines that validate a request before they answer it."""

        async def validate_and_answer(sent: Sent) -> AsyncIterator[Any]:
            parse_request(EngineRequest(body=sent.body, **sent.header))
            self.valid_calls.append(sent)
            async for chunk in answer(sent):
                yield chunk

        return validate_and_answer

    async def post(self, path: str, body: Any, key: str | None = None, **headers: str) -> httpx.Response:
        """Post JSON text, or a value as JSON, with an inference key."""
        content = body if isinstance(body, str | bytes) else json.dumps(body)
        headers |= {"content-type": "application/json"} | ({"authorization": f"Bearer {key}"} if key else {})
        return await self.client.post(path, content=content, headers=headers)

    async def stream(self, send: Callable[[Any], Awaitable[None]], disconnected: asyncio.Event) -> None:
        """Post a streamed completion by ASGI. The client disconnects when `disconnected` is set."""
        body = json.dumps(HELLO | {"stream": True}).encode()
        received = [{"type": "http.request", "body": body}]

        async def receive() -> Any:
            if received:
                return received.pop()
            await disconnected.wait()
            return {"type": "http.disconnect"}

        scope = {"type": "http", "method": "POST", "path": COMPLETIONS, "query_string": b"", "headers": []}
        await self.http(scope, receive, send)

    async def put(self, path: str, key: str | None = KEY, **body: Any) -> httpx.Response:
        return await self.client.put(path, headers={"authorization": f"Bearer {key}"} if key else {}, **body)

    async def status(self) -> dict[str, Any]:
        headers = {"authorization": f"Bearer {KEY}"}
        return (await self.client.get("/eldr/status", headers=headers)).json()


@asynccontextmanager
async def running_app(
    *,
    prefill: Callable[[Any], AsyncIterator[Any]] = good_prefill,
    decode: Callable[[Any], AsyncIterator[Any]] = unstreamed_answer,
    actor: FakeActor | None = None,
    admin_key: str | None = KEY,
    model_id: str = "m",
    adapters: tuple[str, ...] = (),
    validated: bool = True,
    path_options: PathOptions | None = None,
    **options: Any,
) -> AsyncIterator[App]:
    """Run the ingress. `options` are those of IngressOptions.

    Args:
        validated: whether engines validate requests like vLLM before they answer.
    """
    actor = actor or FakeActor()
    ingress_options = IngressOptions(**options)
    app = App(prefill, decode, ingress_options, validated)
    fleets = iter((app.prefill, app.decode))
    handle: Any = Mock(check_health=Mock(remote=AsyncMock()))

    def create_router_client(*args: Any, **options: Any) -> RouterClient:
        app.router_client = RouterClient(*args, **options)
        return app.router_client

    with (
        patch.object(ingress, "RouterCalls", lambda find, settings: actor),
        patch.object(ingress, "RouterClient", create_router_client),
        patch.object(ingress, "Fleet", lambda directory, **options: next(fleets)),
        patch.object(serve, "get_replica_context", lambda: SimpleNamespace(servable_object=app.ingress)),
    ):
        app.ingress = _Ingress(
            prefill=handle,
            decode=handle,
            tokenizer="/nowhere",
            model_cards=[{"id": name, "object": "model"} for name in (model_id, *adapters)],
            openapi=_OPENAPI,
            application=f"test-{next(_names)}",
            router_settings=RouterSettings(model_id=model_id),
            options=ingress_options,
            engine_version="0.0-test",
            path_options=path_options or PathOptions(retry_backoff_s=0.0),
            prefill_options=PrefillRouterOptions(),
            admin_key_sha256=hashlib.sha256(admin_key.encode()).hexdigest() if admin_key else None,
        )
        transport = httpx.ASGITransport(app.http, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://test", timeout=10) as app.client:
            try:
                yield app
            finally:
                await app.ingress.stop()
