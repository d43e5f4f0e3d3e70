"""The ingress: the OpenAI endpoints over prefill, placement and decode, and /eldr.

It parses no more of a request than placement needs; engines validate it, and answers pass as bytes. So it
imports neither vLLM nor Ray Serve LLM.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from ray import serve
from ray.serve.handle import DeploymentHandle
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from eldr_serve.channel import CallFailed, ChannelLost
from eldr_serve.routing import Placement
from eldr_serve.serving.admission import (
    Admission,
    Gate,
    IngressOptions,
    parse_json,
    refusal,
    refused_response,
)
from eldr_serve.serving.decode_router import actor_name, connect
from eldr_serve.serving.errors import BadRequest, Overloaded, Refused, SwapRefused, sentence
from eldr_serve.serving.fleet import Fleet
from eldr_serve.serving.http_server import HttpServer
from eldr_serve.serving.path import Engines, PathOptions, RequestPath
from eldr_serve.serving.replicas import directory
from eldr_serve.serving.router_calls import AWAY, RouterCalls
from eldr_serve.serving.router_client import RouterClient
from eldr_serve.serving.router_settings import RouterSettings
from eldr_serve.serving.warmup import Warmup
from eldr_serve.serving.wire import Asked, Generation, sequences

logger = logging.getLogger(__name__)

DOMAIN_HEADER = "x-eldr-domain"
_NOT_FOR_ENGINES = {"authorization", "cookie", "content-length", "host"}


class PolicyChange(BaseModel):
    """Body of PUT /eldr/policy."""

    model_config = ConfigDict(extra="forbid")

    name: str = Field(description="name of the policy")
    parameters: dict[str, Any] = Field(default_factory=dict, description="its parameters")


class EldrIngress:
    """Runs chat and text completions over prefill, placement and decode; other endpoints on a decode engine.

    Args:
        prefill, decode: the deployments; called for their health alone, and to learn their replicas.
        model_card: what `GET /v1/models` says of the model.
        openapi: the OpenAPI document.
        application: names the DecodeRouter actor.
        router: what that actor is started with.
        max_load_ratio: a prefill replica above this times the mean load is passed over.
        max_kv_usage: a prefill replica with more than this share of its KV blocks in use takes no prompt.
        admin_key_sha256: SHA-256 (hex) of the key for PUT /eldr/*; None refuses them all.
    """

    def __init__(
        self,
        *,
        prefill: DeploymentHandle,
        decode: DeploymentHandle,
        model_card: dict[str, Any],
        openapi: dict[str, Any],
        application: str,
        router: RouterSettings,
        options: IngressOptions,
        path_options: PathOptions,
        max_load_ratio: float = 1.25,
        max_kv_usage: float = 0.95,
        admin_key_sha256: str | None = None,
    ) -> None:
        self.model_card, self.openapi = model_card, openapi
        self._prefill = Fleet(directory(prefill_directory(application)))
        self._prefill.directory.budget.max_usage = max_kv_usage
        self._decode = Fleet(directory(decode_directory(application)))
        calls = RouterCalls(lambda: connect(actor_name(application), router))
        self._client = RouterClient(calls, self._decode)
        self.gate = Gate(options, admin_key_sha256, self._client.count)
        self._router = router
        engines = Engines(self._prefill, self._decode, max_load_ratio)
        self._path = RequestPath(engines=engines, client=self._client, options=path_options)
        self._warmup = Warmup(
            engines=engines, handles=[prefill, decode], client=self._client, model_id=router.model_id
        )
        self._started: asyncio.Task[None] | None = None
        self._http: HttpServer | None = None

    async def check_health(self) -> None:
        """Called by Serve from the start on; the first call starts the background work.

        Raises:
            OSError: its port is somebody else's; whatever else has ended that work.
        """
        if self._started is None:
            self._started = asyncio.create_task(self._start())
        if self._started.done():
            self._started.result()

    async def _start(self) -> None:
        self._prefill.start()
        self._decode.start()
        try:
            await self._client.call("configure", self._router)
        except AWAY as error:
            logger.warning("DecodeRouter is not up yet: %r", error)
        self._client.start()
        if self.gate.options.port is not None:
            self._http = HttpServer(application(), self.gate.options.host, self.gate.options.port)
        await self._warmup.run()

    async def __del__(self) -> None:
        """Serve's hook before it ends the replica: answers end first."""
        if self._http is not None:
            await self._http.drain()

    async def stop(self) -> None:
        """End the background work and all channels."""
        if self._started is not None:
            self._started.cancel()
        await self._client.stop()
        await self._prefill.stop()
        await self._decode.stop()

    # -- OpenAI ----------------------------------------------------------------------------------

    async def generate(self, method: str, request: Request) -> Response:
        """Chat and text completions."""
        body = await request.body()
        asked = self._asked(body)
        count, most = sequences(asked), self.gate.options.max_sequences
        if count > most:
            raise BadRequest(f"{count} answers are asked for (prompts x n), the most allowed are {most}")
        self._client.start()
        generation = Generation(
            method, body, asked, _headers_for_engines(request), request.headers.get(DOMAIN_HEADER)
        )
        leases: list[Placement] = []
        handovers: list[float] = []
        streaming: list[asyncio.Task[Any]] = []

        def cut_off() -> None:
            self._client.count("slow_clients")
            for task in streaming:
                task.cancel()

        run = self._path.generate(
            generation, placed=leases.append, handed_over=handovers.append, cut_off=cut_off
        )
        try:
            first = await anext(run)
        except BaseException:
            await run.aclose()
            raise
        lease = leases[-1]
        headers = {
            "x-eldr-decode-worker": lease.replica,
            "x-eldr-band": str(lease.band),
            "x-eldr-policy": lease.policy,
        }
        if asked.stream and handovers:
            # A stream's headers leave with its first chunk; a whole answer's time would hold all its tokens.
            headers["x-eldr-handover-ms"] = f"{1000 * handovers[-1]:.3f}"
        if asked.stream:
            return _Streamed(first, run, headers, streaming)
        whole = b"".join([first, *[chunk async for chunk in run]])
        return Response(whole, 200, headers, "application/json")

    async def other(self, method: str, request: Request) -> Response:
        """An endpoint that generates nothing: any decode engine's answer, as it is."""
        body = await request.body()
        self._asked(body)
        in_flight = self._decode.in_flight
        if not in_flight:
            raise Overloaded("no decode replica can be reached")
        replica = min(in_flight, key=lambda name: (in_flight[name], name))
        call = self._decode.call(replica, method, {"headers": _headers_for_engines(request)}, body)
        try:
            chunk = await call.read()
        finally:
            call.cancel()
        return Response(chunk.payload if chunk else b"", media_type="application/json")

    def _asked(self, body: bytes) -> Asked:
        fields = parse_json(body)
        if not isinstance(fields, dict):
            raise BadRequest("the body must be a JSON object")
        try:
            asked = Asked.model_validate(fields)
        except ValidationError as error:
            raise BadRequest(sentence(error)) from error
        if asked.model is not None and asked.model != self._router.model_id:
            raise Refused(f"there is no model {asked.model!r}", status=404)
        return asked

    # -- /eldr -----------------------------------------------------------------------------------

    async def status(self, request: Request) -> Response:
        """Workers, load, policy, table and counters of the router; and this ingress's own part."""
        try:
            status = await self._client.call("status")
        except AWAY as error:
            status = {"router": f"away ({type(error).__name__})"}
        own = {
            "in_flight": self.gate.in_flight,
            "leases": self._client.leases,
            "router_away": self._client.router_away,
            "warm_pairs": self._warmup.pairs,
            "ready": self._warmup.ready,
            "stages": self._path.stages.summary(),
            "prefill_kv_usage": self._prefill.directory.budget.usage,
            "decode_kv_usage": self._decode.directory.budget.usage,
        }
        return JSONResponse(status | {"ingress": own})

    async def set_policy(self, request: Request) -> Response:
        """Change the policy for every ingress at once."""
        try:
            change = PolicyChange.model_validate(parse_json(await request.body()))
        except ValidationError as error:
            raise BadRequest(sentence(error)) from error
        return await self._administer("set_policy", change.name, change.parameters)

    async def swap_table(self, request: Request) -> Response:
        """Swap the centroid table; the body is a RoutingTable file."""
        return await self._administer("swap_table", await request.body())

    async def _administer(self, method: str, *args: Any) -> Response:
        try:
            settings = await self._client.call(method, *args)
        except SwapRefused as error:
            raise BadRequest(str(error)) from error
        except AWAY as error:
            raise Overloaded(f"the DecodeRouter does not answer ({type(error).__name__})") from error
        return JSONResponse(
            {
                "policy": settings.policy,
                "parameters": settings.parameters,
                "settings_version": settings.version,
                "table_version": settings.table_version,
            }
        )


class _Streamed(Response):
    """Bytes from an engine as they come; when the client has gone, its engines are left at once.

    Args:
        tasks: gets the task that sends them.
    """

    def __init__(
        self,
        first: bytes,
        run: AsyncGenerator[bytes, None],
        headers: dict[str, str],
        tasks: list[asyncio.Task[Any]],
    ) -> None:
        super().__init__(headers=headers, media_type="text/event-stream")
        del self.headers["content-length"]
        self._first, self._run, self._tasks = first, run, tasks

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.append(task)
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await send({"type": "http.response.body", "body": self._first, "more_body": True})
            async for chunk in self._run:
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
            await send({"type": "http.response.body", "body": b""})
        finally:
            await self._run.aclose()


def application() -> Starlette:
    """The HTTP application of an ingress replica."""

    def ingress() -> EldrIngress:
        found: EldrIngress = serve.get_replica_context().servable_object
        return found

    def endpoint(name: str, *args: str) -> Callable[[Request], Awaitable[Response]]:
        async def answer(request: Request) -> Response:
            response: Response = await getattr(ingress(), name)(*args, request)
            return response

        return answer

    async def models(request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [ingress().model_card]})

    async def model(request: Request) -> Response:
        card = ingress().model_card
        if request.path_params["model"] != card["id"]:
            raise Refused(f"there is no model {request.path_params['model']!r}", status=404)
        return JSONResponse(card)

    async def openapi(request: Request) -> Response:
        return JSONResponse(ingress().openapi)

    posted = {
        "/v1/chat/completions": endpoint("generate", "chat"),
        "/v1/completions": endpoint("generate", "completions"),
        "/v1/embeddings": endpoint("other", "embeddings"),
        "/v1/score": endpoint("other", "score"),
        "/tokenize": endpoint("other", "tokenize"),
        "/detokenize": endpoint("other", "detokenize"),
    }
    return Starlette(
        routes=[
            *(Route(path, answer, methods=["POST"]) for path, answer in posted.items()),
            Route("/v1/models", models),
            Route("/v1/models/{model:path}", model),
            Route("/openapi.json", openapi),
            Route("/eldr/status", endpoint("status")),
            Route("/eldr/policy", endpoint("set_policy"), methods=["PUT"]),
            Route("/eldr/table", endpoint("swap_table"), methods=["PUT"]),
        ],
        middleware=[
            Middleware(CORSMiddleware, allow_origins=["*"], allow_methods=["*"], allow_headers=["*"]),
            Middleware(Admission, gate=lambda: ingress().gate),
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
    return refused_response(error)


async def _call_failed(request: Request, error: Any) -> Response:
    retry_after = {"Retry-After": "1"} if error.status == 503 else None
    return Response(error.body, error.status, retry_after, "application/json")


async def _channel_lost(request: Request, error: Any) -> Response:
    return refusal(f"an engine was lost: {sentence(error)}", 503, 1)


async def _http_error(request: Request, error: Any) -> Response:
    return refusal(error.detail, error.status_code)


async def _fault(request: Request, error: Exception) -> Response:
    return refusal("the ingress failed; its log says more", 500)


def decode_directory(application: str) -> str:
    """Under which this process's decode request router is found."""
    return f"{application}/decode"


def prefill_directory(application: str) -> str:
    """Under which this process's prefill request router is found."""
    return f"{application}/prefill"


def _headers_for_engines(request: Request) -> dict[str, str]:
    return {name: value for name, value in request.headers.items() if name not in _NOT_FOR_ENGINES}
