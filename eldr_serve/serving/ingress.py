"""The ingress: Ray Serve LLM's OpenAI endpoints, with chat and completions on our path, and /eldr."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
from collections.abc import AsyncGenerator, Callable
from typing import Any

from fastapi import FastAPI, HTTPException
from pydantic import BaseModel, ConfigDict, Field
from ray.exceptions import RayError
from ray.serve.handle import DeploymentHandle
from ray.serve.llm.ingress import OpenAiIngress
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from eldr_serve.serving.compat import (
    DEFAULT_ENDPOINTS,
    ChatCompletionRequest,
    CompletionRequest,
    OpenAIHTTPException,
    RawRequestInfo,
    check_ray,
    picklable_chat,
)
from eldr_serve.serving.decode_router import RouterSpec, actor_name, connect
from eldr_serve.serving.errors import Overloaded, SwapRefused
from eldr_serve.serving.messages import Lease
from eldr_serve.serving.path import PathOptions, RequestPath
from eldr_serve.serving.replicas import Engines, directory
from eldr_serve.serving.router_client import RouterClient
from eldr_serve.serving.warmup import Warmup

logger = logging.getLogger(__name__)

DOMAIN_HEADER = "x-eldr-domain"


class IngressOptions(BaseModel, frozen=True, extra="forbid"):
    """What one ingress replica does by itself."""

    max_in_flight: int = Field(
        default=4096, ge=1, description="requests in one ingress replica; more get 429 before prefill"
    )
    router_timeout_s: float = Field(
        default=1.0, gt=0, description="wait for the DecodeRouter before placing by own load, s"
    )
    prewarm: bool = Field(
        default=True, description="send one token through each prefill-decode pair before users do"
    )


class PolicyChange(BaseModel):
    """Body of PUT /eldr/policy."""

    model_config = ConfigDict(extra="forbid")

    name: str = Field(description="name of the policy")
    parameters: dict[str, Any] = Field(default_factory=dict, description="its parameters")


class EldrIngress(OpenAiIngress):
    """Runs chat and text completions over prefill, placement and decode; the rest is Ray Serve LLM's.

    Args:
        llm_deployments: model id -> decode deployment, which also answers every other endpoint.
        prefill: the prefill deployment.
        application: names the DecodeRouter actor.
        router: what that actor is started with.
        admin_key_sha256: SHA-256 (hex) of the key for PUT /eldr/*; None refuses them all.
    """

    def __init__(
        self,
        llm_deployments: dict[str, DeploymentHandle],
        model_cards: dict[str, Any],
        *,
        prefill: DeploymentHandle,
        application: str,
        router: RouterSpec,
        options: IngressOptions,
        path_options: PathOptions,
        admin_key_sha256: str | None = None,
        lora_paths: dict[str, str] | None = None,
    ) -> None:
        check_ray()
        super().__init__(llm_deployments, model_cards, lora_paths=lora_paths)
        self._options = options
        self._admin_key_sha256 = admin_key_sha256
        self._in_flight = 0
        self._closing: set[asyncio.Task[None]] = set()
        self._decode_replicas = directory(decode_directory(application))
        self._client = RouterClient(
            lambda: connect(actor_name(application), router),
            self._decode_replicas,
            timeout_s=options.router_timeout_s,
        )
        self._router = router
        self._prefill_replicas = directory(prefill_directory(application))
        engines = Engines(
            prefill,
            llm_deployments[router.model_id],
            self._prefill_replicas,
            self._decode_replicas,
        )
        self._path = RequestPath(engines=engines, client=self._client, options=path_options)
        self._warmup = Warmup(
            engines=engines, client=self._client, model_id=router.model_id, enabled=options.prewarm
        )
        self._started: asyncio.Task[None] | None = None

    async def check_health(self) -> None:
        """Called by Serve from the start on; the first call starts the background work."""
        if self._started is None:
            self._started = asyncio.create_task(self._start())

    async def _start(self) -> None:
        try:
            await self._client.call("configure", self._router)
        except (RayError, TimeoutError) as error:
            logger.warning("DecodeRouter is not up yet: %r", error)
        self._client.start()
        await self._warmup.run()

    # -- OpenAI ----------------------------------------------------------------------------------

    async def chat(self, body: ChatCompletionRequest, request: Request) -> Response:
        return await self._admitted(super().chat, body, request)

    async def completions(self, body: CompletionRequest, request: Request) -> Response:
        return await self._admitted(super().completions, body, request)

    async def _admitted(self, endpoint: Callable[..., Any], body: Any, request: Request) -> Response:
        if self._in_flight >= self._options.max_in_flight:
            self._client.count("refused_overload")
            return _refusal(f"{self._in_flight} requests are in flight here, the most allowed", 429, 1)
        self._client.start()
        response = await self._answer(endpoint, body, request)
        if isinstance(response, StreamingResponse):
            return _Streamed(response, then=lambda: self._leave_engines(request))
        self._leave_engines(request)
        return response

    async def _answer(self, endpoint: Callable[..., Any], body: Any, request: Request) -> Response:
        try:
            response: Response = await endpoint(body, request)
        except Overloaded as error:
            return _refusal(str(error), error.status, error.retry_after_s)
        except OpenAIHTTPException as error:
            return _refusal(error.message, error.status_code)
        except HTTPException as error:
            return _refusal(str(error.detail), error.status_code)
        lease: Lease | None = getattr(request.state, "eldr_lease", None)
        if lease is not None:
            response.headers["x-eldr-decode-worker"] = lease.replica
            response.headers["x-eldr-band"] = str(lease.band)
            response.headers["x-eldr-policy"] = lease.policy
        # A stream's headers leave with its first chunk; a whole answer's time would hold all its tokens.
        handover_s: float | None = getattr(request.state, "eldr_handover_s", None)
        if handover_s is not None and isinstance(response, StreamingResponse):
            response.headers["x-eldr-handover-ms"] = f"{1000 * handover_s:.3f}"
        return response

    def _leave_engines(self, request: Request) -> None:
        """The answer has ended, or its client has gone: give up the worker and the KV blocks now.

        A generator that was left suspended would keep them until the garbage collector comes by, which
        in an idle process may be never. Nothing waits here: the caller may be being cancelled.
        """
        run: AsyncGenerator[Any, None] | None = getattr(request.state, "eldr_run", None)
        if run is not None:
            task = asyncio.get_running_loop().create_task(run.aclose())
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    async def _get_response(
        self, *, body: Any, call_method: str, raw_request: Request | None = None
    ) -> AsyncGenerator[Any, None]:
        """Ray's seam between an endpoint and the engines (see compat)."""
        if call_method not in ("chat", "completions"):
            async for response in super()._get_response(
                body=body, call_method=call_method, raw_request=raw_request
            ):
                yield response
            return
        await self._get_model_id(body.model)
        run = self._run(body, call_method, raw_request)
        _note(raw_request, "eldr_run", run)
        async for chunk in run:
            yield chunk

    async def _run(
        self, body: Any, call_method: str, raw_request: Request | None
    ) -> AsyncGenerator[Any, None]:
        self._in_flight += 1
        stream = self._path.generate(
            picklable_chat(body) if isinstance(body, ChatCompletionRequest) else body,
            call_method,
            RawRequestInfo.from_starlette_request(raw_request) if raw_request else None,
            domain=raw_request.headers.get(DOMAIN_HEADER) if raw_request else None,
            placed=lambda lease: _note(raw_request, "eldr_lease", lease),
            handed_over=lambda seconds: _note(raw_request, "eldr_handover_s", seconds),
        )
        try:
            async for chunk in stream:
                yield chunk
        finally:
            self._in_flight -= 1
            await stream.aclose()

    # -- /eldr -----------------------------------------------------------------------------------

    async def eldr_status(self) -> Response:
        """Workers, load, policy, table and counters of the router; and this ingress's own part."""
        try:
            status = await self._client.call("status")
        except (RayError, TimeoutError, ValueError) as error:
            status = {"router": f"away ({type(error).__name__})"}
        own = {
            "in_flight": self._in_flight,
            "leases": self._client.leases,
            "router_away": self._client.router_away,
            "warm_pairs": self._warmup.pairs,
            "ready": self._warmup.ready,
            "stages": self._path.stages.summary(),
            "prefill_kv_usage": self._prefill_replicas.budget.usage,
            "decode_kv_usage": self._decode_replicas.budget.usage,
        }
        return JSONResponse(status | {"ingress": own})

    async def eldr_policy(self, body: PolicyChange, request: Request) -> Response:
        """Change the policy for every ingress at once."""
        return await self._administer(request, "set_policy", body.name, body.parameters)

    async def eldr_table(self, request: Request) -> Response:
        """Swap the centroid table; the body is a RoutingTable file."""
        return await self._administer(request, "swap_table", await request.body())

    async def _administer(self, request: Request, method: str, *args: Any) -> Response:
        if self._admin_key_sha256 is None:
            return _refusal("no admin key is configured: set ELDR_ADMIN_KEY where the app is built", 403)
        given = request.headers.get("authorization", "").removeprefix("Bearer ").encode()
        if not hmac.compare_digest(hashlib.sha256(given).hexdigest(), self._admin_key_sha256):
            return _refusal("the admin key is missing or wrong: send Authorization: Bearer KEY", 401)
        try:
            settings = await self._client.call(method, *args)
        except SwapRefused as error:
            return _refusal(str(getattr(error, "cause", error)), 400)
        except (RayError, TimeoutError) as error:
            return _refusal(f"the DecodeRouter does not answer ({type(error).__name__})", 503, 1)
        return JSONResponse(
            {
                "policy": settings.policy,
                "parameters": settings.parameters,
                "settings_version": settings.version,
                "table_version": settings.table_version,
            }
        )


class _Streamed(StreamingResponse):
    """A response of Ray Serve LLM, and what is done when it has ended, however it ended."""

    def __init__(self, response: StreamingResponse, *, then: Callable[[], None]) -> None:
        super().__init__(response.body_iterator, response.status_code)
        self.raw_headers = response.raw_headers
        self._then = then

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._then()


ENDPOINTS: dict[str, Callable[[FastAPI], Callable[..., Any]]] = {
    **DEFAULT_ENDPOINTS,
    "eldr_status": lambda app: app.get("/eldr/status"),
    "eldr_policy": lambda app: app.put("/eldr/policy"),
    "eldr_table": lambda app: app.put("/eldr/table"),
}


def decode_directory(application: str) -> str:
    """Under which this process's decode request router is found."""
    return f"{application}/decode"


def prefill_directory(application: str) -> str:
    """Under which this process's prefill request router is found."""
    return f"{application}/prefill"


def _refusal(message: str, status: int, retry_after_s: int | None = None) -> JSONResponse:
    kind = "overloaded" if status in (429, 503) else "invalid_request_error"
    headers = {"Retry-After": str(retry_after_s)} if retry_after_s is not None else None
    error = {"error": {"message": message, "type": kind, "param": None, "code": status}}
    return JSONResponse(error, status, headers)


def _note(raw_request: Request | None, name: str, value: Any) -> None:
    if raw_request is not None:
        setattr(raw_request.state, name, value)
