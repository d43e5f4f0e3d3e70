"""The ingress: Ray Serve LLM's OpenAI endpoints, with chat and completions on our path, and /eldr."""

from __future__ import annotations

import eldr_serve.serving.imports  # noqa: F401

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from functools import partial
from typing import Annotated, Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ConfigDict, Field, WrapValidator
from ray import serve
from ray.exceptions import RayActorError, RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from eldr_serve.routing import Placement
from eldr_serve.serving.admission import (
    Admission,
    Gate,
    IngressOptions,
    StrictRoute,
    refusal,
    sentence,
    sound,
)
from eldr_serve.serving.compat import (
    DEFAULT_ENDPOINTS,
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    EmbeddingRequest,
    Ingress,
    OpenAIHTTPException,
    RawRequestInfo,
    ScoreRequest,
    TokenizeCompletionRequest,
    check_ray,
    openai_application,
)
from eldr_serve.serving.decode_router import actor_name, connect
from eldr_serve.serving.errors import BadRequest, Overloaded, Refused, SwapRefused
from eldr_serve.serving.path import PathOptions, RequestPath
from eldr_serve.serving.replicas import Engines, directory
from eldr_serve.serving.router_client import RouterClient
from eldr_serve.serving.router_settings import RouterSettings
from eldr_serve.serving.warmup import Warmup
from eldr_serve.serving.wire import sequences

logger = logging.getLogger(__name__)

DOMAIN_HEADER = "x-eldr-domain"


class PolicyChange(BaseModel):
    """Body of PUT /eldr/policy."""

    model_config = ConfigDict(extra="forbid")

    name: str = Field(description="name of the policy")
    parameters: dict[str, Any] = Field(default_factory=dict, description="its parameters")


# What FastAPI makes of a body before an endpoint sees it: valid, and fit to travel, or refused with 400.
_ChatBody = Annotated[ChatCompletionRequest, WrapValidator(sound)]
_CompletionBody = Annotated[CompletionRequest, WrapValidator(sound)]
_EmbeddingBody = Annotated[EmbeddingRequest, WrapValidator(sound)]
_ScoreBody = Annotated[ScoreRequest, WrapValidator(sound)]
_TokenizeBody = Annotated[TokenizeCompletionRequest, WrapValidator(sound)]
_DetokenizeBody = Annotated[DetokenizeRequest, WrapValidator(sound)]


class EldrIngress(Ingress):
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
        router: RouterSettings,
        options: IngressOptions,
        path_options: PathOptions,
        admin_key_sha256: str | None = None,
        lora_paths: dict[str, str] | None = None,
    ) -> None:
        check_ray()
        super().__init__(llm_deployments, model_cards, lora_paths=lora_paths)
        self._closing: set[asyncio.Task[None]] = set()
        self._decode_replicas = directory(decode_directory(application))
        self._client = RouterClient(
            lambda: connect(actor_name(application), router),
            self._decode_replicas,
        )
        self.gate = Gate(options, admin_key_sha256, self._client.count)
        self._router = router
        self._prefill_replicas = directory(prefill_directory(application))
        engines = Engines(
            prefill,
            llm_deployments[router.model_id],
            self._prefill_replicas,
            self._decode_replicas,
        )
        self._path = RequestPath(engines=engines, client=self._client, options=path_options)
        self._warmup = Warmup(engines=engines, client=self._client, model_id=router.model_id)
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

    async def chat(self, body: _ChatBody, request: Request) -> Response:
        return await self._generate(super().chat, body, request)

    async def completions(self, body: _CompletionBody, request: Request) -> Response:
        return await self._generate(super().completions, body, request)

    # These are Ray's, with bodies that are sound.
    async def embeddings(self, body: _EmbeddingBody, request: Request) -> Response:
        return await super().embeddings(body, request)  # type: ignore[no-any-return]

    async def score(self, body: _ScoreBody, request: Request) -> Response:
        return await super().score(body, request)  # type: ignore[no-any-return]

    async def tokenize(self, body: _TokenizeBody, request: Request) -> Response:
        return await super().tokenize(body, request)  # type: ignore[no-any-return]

    async def detokenize(self, body: _DetokenizeBody, request: Request) -> Response:
        return await super().detokenize(body, request)  # type: ignore[no-any-return]

    async def model_of(self, model: str | None) -> str:
        """No adapters are served; Ray would keep a handle for each name that anybody makes up for one."""
        found: str = await super().model_of(model)
        if found not in self._model_cards:
            raise Refused(f"there is no model {found!r}", status=404)
        return found

    async def _generate(self, endpoint: Callable[..., Any], body: Any, request: Request) -> Response:
        asked, most = sequences(body), self.gate.options.max_sequences
        if asked > most:
            raise BadRequest(f"{asked} answers are asked for (prompts x n), the most allowed are {most}")
        self._client.start()
        try:
            response: Response = await endpoint(body, request)
        except BaseException:
            self._leave_engines(request)
            raise
        lease: Placement | None = getattr(request.state, "eldr_lease", None)
        if lease is not None:
            response.headers["x-eldr-decode-worker"] = lease.replica
            response.headers["x-eldr-band"] = str(lease.band)
            response.headers["x-eldr-policy"] = lease.policy
        if isinstance(response, StreamingResponse):
            # Its headers leave with its first chunk; a whole answer's time would hold all its tokens.
            handover_s: float | None = getattr(request.state, "eldr_handover_s", None)
            if handover_s is not None:
                response.headers["x-eldr-handover-ms"] = f"{1000 * handover_s:.3f}"
            return _Streamed(response, then=lambda: self._leave_engines(request))
        self._leave_engines(request)
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

    async def respond(
        self, *, body: Any, call_method: str, raw_request: Request | None = None
    ) -> AsyncGenerator[Any, None]:
        """Ray's seam between an endpoint and the engines."""
        if call_method not in ("chat", "completions"):
            async for response in super().respond(
                body=body, call_method=call_method, raw_request=raw_request
            ):
                yield response
            return
        await self.model_of(body.model)
        run = self._run(body, call_method, raw_request)
        _note(raw_request, "eldr_run", run)
        async for chunk in run:
            yield chunk

    async def _run(
        self, body: Any, call_method: str, raw_request: Request | None
    ) -> AsyncGenerator[Any, None]:
        stream = self._path.generate(
            body,
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
            await stream.aclose()

    # -- /eldr -----------------------------------------------------------------------------------

    async def eldr_status(self) -> Response:
        """Workers, load, policy, table and counters of the router; and this ingress's own part."""
        try:
            status = await self._client.call("status")
        except (RayError, TimeoutError, ValueError) as error:
            status = {"router": f"away ({type(error).__name__})"}
        own = {
            "in_flight": self.gate.in_flight,
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
        return await self._administer("set_policy", body.name, body.parameters)

    async def eldr_table(self, request: Request) -> Response:
        """Swap the centroid table; the body is a RoutingTable file."""
        return await self._administer("swap_table", await request.body())

    async def _administer(self, method: str, *args: Any) -> Response:
        try:
            settings = await self._client.call(method, *args)
        except SwapRefused as error:
            raise BadRequest(str(getattr(error, "cause", error))) from error
        except (RayError, TimeoutError) as error:
            raise Overloaded(f"the DecodeRouter does not answer ({type(error).__name__})") from error
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


def application() -> FastAPI:
    """The HTTP application of an ingress replica, without its endpoints."""
    app: FastAPI = openai_application()
    app.router.route_class = StrictRoute
    for error, status in _STATUS.items():
        app.add_exception_handler(error, partial(_refuse, status))
    app.add_middleware(Admission, gate=lambda: serve.get_replica_context().servable_object.gate)
    return app


# Errors that endpoints raise, and their status where they have none of their own. All others are faults.
_STATUS: dict[type[Exception], int] = {
    Refused: 0,
    HTTPException: 0,
    OpenAIHTTPException: 0,
    RequestValidationError: 400,
    RayActorError: 503,
    RayServeException: 503,
}


async def _refuse(status: int, request: Request, error: Exception) -> Response:
    """FastAPI's handler of an error: an OpenAI-like answer that quotes no value of the request."""
    message = getattr(error, "message", None) or getattr(error, "detail", None)
    return refusal(
        message if isinstance(message, str) else sentence(error),
        getattr(error, "status", 0) or getattr(error, "status_code", 0) or status,
        getattr(error, "retry_after_s", 1 if status == 503 else None),
    )


def decode_directory(application: str) -> str:
    """Under which this process's decode request router is found."""
    return f"{application}/decode"


def prefill_directory(application: str) -> str:
    """Under which this process's prefill request router is found."""
    return f"{application}/prefill"


def _note(raw_request: Request | None, name: str, value: Any) -> None:
    if raw_request is not None:
        setattr(raw_request.state, name, value)
