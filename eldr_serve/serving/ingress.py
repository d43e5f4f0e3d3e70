"""The ingress: the OpenAI endpoints over prefill, placement and decode, and /eldr.

It parses no more of a request than placement needs; engines validate it, and answers pass as bytes. So it
imports neither vLLM nor Ray Serve LLM.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from ray import serve
from ray.serve.handle import DeploymentHandle
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from eldr_serve.channel import CallFailed, ChannelLost
from eldr_serve.engine.keys import STEERING_HEADERS
from eldr_serve.errors import BadRequest, Overloaded, Refused, SwapRefused, sentence
from eldr_serve.pages import SELF_CONTAINED, live_page
from eldr_serve.routing import Placement
from eldr_serve.serving.admission import (
    Admission,
    Gate,
    IngressOptions,
    TracingOptions,
    parse_json,
    refusal,
    refused_response,
)
from eldr_serve.serving.autoscaling import IN_FLIGHT
from eldr_serve.serving.decode_router import actor_name, connect
from eldr_serve.serving.expert_swap import place_everywhere
from eldr_serve.serving.fleet import Fleet
from eldr_serve.serving.http_server import HttpServer
from eldr_serve.serving.loop_watch import LoopWatch
from eldr_serve.serving.messages import Answered, NamedPolicy, Settings
from eldr_serve.serving.path import RequestPath
from eldr_serve.serving.path_options import PathOptions
from eldr_serve.serving.port import Port, owner_of_port
from eldr_serve.serving.prompt_tokens import PromptTokens
from eldr_serve.serving.replicas import directory
from eldr_serve.serving.request_log import RequestLog
from eldr_serve.serving.request_run import Engines
from eldr_serve.serving.router_calls import AWAY, RouterCalls
from eldr_serve.serving.router_client import RouterClient
from eldr_serve.serving.router_settings import RouterSettings
from eldr_serve.serving.signatures.control import PoolControl
from eldr_serve.serving.tenants import Visit
from eldr_serve.serving.warmup import Warmup
from eldr_serve.serving.watching import PERIOD_S, IngressMetrics
from eldr_serve.serving.wire import Asked, Generation, max_new_tokens, sequences, tenant_salt

if TYPE_CHECKING:
    from eldr_serve.serving.tracing import Tracing

logger = logging.getLogger(__name__)

DOMAIN_HEADER = "x-eldr-domain"
_NOT_FOR_ENGINES = {
    "authorization",
    "content-encoding",
    "content-length",
    "cookie",
    "host",
} | STEERING_HEADERS
_ALONE_S, _LOOK_S = 5.0, 0.05  # until it listens without a decode replica
_METRICS_ABOUT = (
    b"# One ingress process. Requests, router, workers and engines: Ray's metrics port of each node "
    b"(docs/watching.md).\n"
)
_BYTES_A_TOKEN = 4  # of a body, until the prompt's tokens are counted


class PolicyChange(BaseModel):
    """Body of PUT /eldr/policy."""

    model_config = ConfigDict(extra="forbid")

    name: str = Field(description="name of the policy")
    parameters: dict[str, Any] = Field(default_factory=dict, description="its parameters")


class EldrIngress:
    """Runs chat and text completions over prefill, placement and decode; other endpoints on a decode engine.

    Args:
        prefill, decode: handles of the deployments, used only for their health and to discover their
            replicas. Without `prefill`, decode engines prefill as well.
        tokenizer: location of the model's tokenizer, a folder or a name on the hub.
        model_card: description of the model in `GET /v1/models`.
        openapi: the OpenAPI document.
        application: name of the application, part of the name of the DecodeRouter actor.
        router: start arguments of that actor.
        max_load_ratio: a prefill replica whose load exceeds the mean by this factor is skipped.
        max_kv_usage: a prefill replica with more than this share of its KV blocks in use gets no prompts.
        admin_key_sha256: SHA-256 (hex) of the key for PUT /eldr/*; if None, all of these are refused.
        engine_version: version that `GET /version` returns.

    Raises:
        PortTaken: another application or program has the port of `options`.
    """

    def __init__(
        self,
        *,
        prefill: DeploymentHandle | None,
        decode: DeploymentHandle,
        tokenizer: str,
        model_card: dict[str, Any],
        openapi: dict[str, Any],
        application: str,
        router: RouterSettings,
        options: IngressOptions,
        path_options: PathOptions,
        max_load_ratio: float = 1.25,
        max_kv_usage: float = 0.95,
        admin_key_sha256: str | None = None,
        engine_version: str = "",
    ) -> None:
        self.model_card, self.openapi, self.engine_version = model_card, openapi, engine_version
        self._prefill = Fleet(directory(prefill_directory(application)))
        self._prefill.directory.budget.max_usage = max_kv_usage
        self._decode = Fleet(directory(decode_directory(application)))
        calls = RouterCalls(lambda: connect(actor_name(application), router))
        self._client = RouterClient(calls, self._decode, on_predictor=self._tokenise)
        self.gate = Gate(options, admin_key_sha256, self._client.count)
        self._router = router
        self._pool = PoolControl(application)
        engines = Engines(self._prefill, self._decode, max_load_ratio, whole=prefill is None)
        self._tokens = PromptTokens(tokenizer)
        self._whole = engines.whole
        self._tokenising: asyncio.Task[None] | None = None
        self._path = RequestPath(
            engines=engines, client=self._client, options=path_options, tokens=self._tokens
        )
        self._log = RequestLog(every=options.log_requests == "all", tracing=_tracing(options.tracing))
        handles = [handle for handle in (prefill, decode) if handle is not None]
        self._warmup = Warmup(engines=engines, handles=handles, client=self._client, model_id=router.model_id)
        self._watch = LoopWatch("ingress")
        self._started: asyncio.Task[None] | None = None
        self._http: HttpServer | None = None
        self._port: Port | None = None
        if options.port is not None:
            self._port = Port(options.host, options.port, owner_of_port(application))

    async def check_health(self) -> None:
        """Serve's health check. The first call starts the background work.

        Raise the exception that ended the background work, if any.
        """
        if self._started is None:
            self._started = asyncio.create_task(self._start())
        if self._started.done():
            self._started.result()

    async def _start(self) -> None:
        self._prefill.start()
        self._decode.start()
        if self._whole or self._router.predictor is not None:
            self._tokenise()
            assert self._tokenising is not None
            await self._tokenising
        try:
            await self._client.call("configure", self._router)
        except AWAY as error:
            logger.warning("DecodeRouter is not up yet: %r", error)
        self._client.start()
        tenants, name = self.gate.tenants, uuid.uuid4().hex
        await asyncio.gather(
            self._warmup.run(),
            self._listen(),
            self._export(),
            self._watch.run(),
            tenants.watch(),
            tenants.share(lambda taken: self._client.call("share_limits", name, taken)),
        )

    def _tokenise(self) -> None:
        """Load the tokenizer, once: whoever swapped a predictor in may have told another ingress."""
        failed = self._tokenising is not None and self._tokenising.done() and self._client.tokenizer is None
        if self._tokenising is None or failed:
            self._tokenising = asyncio.get_running_loop().create_task(self._load_tokenizer())

    async def _load_tokenizer(self) -> None:
        try:
            self._client.tokenised_by(await self._tokens.fingerprint())
        except ValueError as error:
            logger.warning("prompts are placed without a prediction: %s", error)

    async def _listen(self) -> None:
        """Answer at the port of its own. Where a decode replica is known soon, not before: other ingresses of
        the node have the connections until then."""
        if self._port is None:
            return
        until = time.monotonic() + _ALONE_S
        while not self._decode.live and time.monotonic() < until:
            await asyncio.sleep(_LOOK_S)
        self._http = HttpServer(application(), self.gate.options, self._port)

    async def _export(self) -> None:
        metrics = IngressMetrics()
        while True:
            metrics.export(self._own())
            await asyncio.sleep(PERIOD_S)

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Serve's hook: what it cannot count itself, since it does not see what comes in at the own port."""
        return {IN_FLIGHT: float(self.gate.in_flight)}

    async def __del__(self) -> None:
        """Serve's hook before it ends the replica: answers end first."""
        if self._http is not None:
            await self._http.drain()
        elif self._port is not None:
            self._port.release()
        await self._log.stop()

    async def stop(self) -> None:
        """End the background work and all channels."""
        if self._started is not None:
            self._started.cancel()
        if self._tokenising is not None:
            self._tokenising.cancel()
        await self._log.stop()
        await self._client.stop()
        await self._prefill.stop()
        await self._decode.stop()

    # -- OpenAI ----------------------------------------------------------------------------------

    async def generate(self, method: str, request: Request) -> Response:
        """Chat and text completions."""
        asked_at = time.monotonic()
        body = await request.body()
        asked = self._asked(body)
        count, most = sequences(asked), self.gate.options.max_sequences
        if count > most:
            raise BadRequest(f"{count} answers are asked for (prompts x n), the most allowed are {most}")
        visit: Visit = request.state.visit
        visit.foresee(len(body) // _BYTES_A_TOKEN, count * max_new_tokens(asked))
        self._client.start()
        generation = Generation(
            method,
            body,
            asked,
            _headers_for_engines(request),
            request.headers.get(DOMAIN_HEADER),
            visit.tenant.name,
            visit.tenant.priority,
            tenant_salt(visit.tenant.name, asked),
        )
        record = self._log.begin(request.scope["path"], visit.tenant.name, generation.headers)
        request.state.named = {"x-eldr-request": record.request_id}
        if record.trace_id:
            request.state.named["x-eldr-trace"] = record.trace_id
        streaming: list[asyncio.Task[Any]] = []

        def placed(lease: Placement) -> None:
            visit.lease = lease

        def cut_off() -> None:
            self._client.count("slow_clients")
            for task in streaming:
                task.cancel()

        run = self._path.generate(generation, record, placed=placed, cut_off=cut_off)
        try:
            first = await anext(run)
        except BaseException:
            await run.aclose()
            raise
        lease = visit.lease
        assert lease is not None
        first_at = time.monotonic()

        def answered() -> None:
            newest = visit.lease or lease  # another one if the stream was resumed
            tokens = newest.generated_tokens
            tpot_s = (time.monotonic() - first_at) / (tokens - 1) if tokens > 1 else None
            self._client.answered_client(Answered(first_at - asked_at, tpot_s))

        headers = request.state.named | {
            "x-eldr-decode-worker": lease.replica,
            "x-eldr-band": str(lease.band),
            "x-eldr-policy": lease.policy,
        }
        if asked.stream and record.handover_s is not None:
            # A stream's headers leave with its first chunk; a whole answer's time would hold all its tokens.
            headers["x-eldr-handover-ms"] = f"{1000 * record.handover_s:.3f}"
        if asked.stream:
            return _Streamed(first, run, headers, streaming, answered)
        whole = b"".join([first, *[chunk async for chunk in run]])
        return Response(whole, 200, headers, "application/json")

    async def other(self, method: str, request: Request) -> Response:
        """An endpoint that generates nothing: any decode engine's answer, as it is."""
        body = await request.body()
        salt = tenant_salt(request.state.visit.tenant.name, self._asked(body))
        in_flight = self._decode.in_flight
        if not in_flight:
            raise Overloaded("no decode replica can be reached")
        replica = min(in_flight, key=lambda name: (in_flight[name], random.random()))
        header = {"headers": _headers_for_engines(request), "cache_salt": salt}
        call = self._decode.call(replica, method, header, body)
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
            raise BadRequest(sentence(error), param=f"body.{error.errors()[0]['loc'][0]}") from error
        if asked.model and asked.model != self._router.model_id:
            raise Refused(f"there is no model {asked.model!r}", status=404, param="model")
        return asked

    # -- /eldr -----------------------------------------------------------------------------------

    async def status(self, request: Request) -> Response:
        """Workers, load, policy, table and counters of the router, and this ingress's own part, to the admin
        key; to others whether all is well."""
        if not self.gate.is_operator(request.headers):
            return JSONResponse(self._coarse())
        return await self._look("status")

    async def ready(self, request: Request) -> Response:
        """For load balancers and readiness probes: 200 once requests may come, 503 and one sentence before.

        They may come when all prefill-decode pairs, or all whole engines, are warm; later on while any decode
        engine that has been warm is up.
        """
        if (awaited := self._warmup.awaited) is not None:
            raise Overloaded(awaited)
        return JSONResponse({"ready": True})

    async def health(self, request: Request) -> Response:
        """Return 200 and an empty body once the service is ready for requests, else 503, like vLLM."""
        await self.ready(request)
        return Response()

    async def version(self, request: Request) -> Response:
        """Return the version of vLLM that the engines run, in vLLM's format."""
        return JSONResponse({"version": self.engine_version})

    async def metrics(self, request: Request) -> Response:
        """Return Prometheus metrics of this process, and the location of all other metrics."""
        return Response(_METRICS_ABOUT + generate_latest(), media_type=CONTENT_TYPE_LATEST)

    async def live(self, request: Request) -> Response:
        """The status, and what the live page draws beside it."""
        self.gate.check_key(request.headers)
        return await self._look("live")

    async def _look(self, method: str) -> Response:
        try:
            status = await self._client.call(method)
        except AWAY as error:
            status = {"router": f"away ({type(error).__name__})"}
        loops = status.get("loops", {}) | {self._watch.role: self._watch.status()}
        own = {"answered_by": self._client.name, "ingress": self._own(), "loops": loops}
        return JSONResponse(status | own)

    def _own(self) -> dict[str, Any]:
        return {
            "in_flight": self.gate.in_flight,
            "waiting": self.gate.places.waiting,
            "leases": self._client.leases,
            "router_away": self._client.router_away,
            "warm_pairs": self._warmup.pairs,
            "ready": self._warmup.ready,
            "prefill_in_flight": self._prefill.in_flight,
            "prefill_oldest_s": self._prefill.oldest_s,
            "stages": self._path.stages.summary(),
            "prefill_wait_s": self._path.prefill.waits_s,
            "prefill_kv_usage": self._prefill.directory.budget.usage,
            "decode_kv_usage": self._decode.directory.budget.usage,
            "experts": self._decode.directory.experts,
        }

    def _coarse(self) -> dict[str, Any]:
        settings = self._client.link.settings
        return {
            "model": self._router.model_id,
            "policy": settings.policy if settings else None,
            "prefill_replicas": len(self._prefill.live),
            "decode_replicas": len(self._decode.live),
            "ingress": {
                "ready": self._warmup.ready,
                "router_away": self._client.router_away,
                "in_flight": self.gate.in_flight,
                "leases": self._client.leases,
            },
            "details": "with Authorization: Bearer ADMIN_KEY",
        }

    async def set_policy(self, request: Request) -> Response:
        """Change the policy for every ingress at once."""
        try:
            change = PolicyChange.model_validate(parse_json(await request.body()))
        except ValidationError as error:
            raise BadRequest(sentence(error)) from error
        return await self._administer("set_policy", change.name, change.parameters)

    async def set_shadow(self, request: Request) -> Response:
        """Compare the live policy with another one from now on; a DELETE ends that."""
        if request.method == "DELETE":
            return await self._administer("set_shadow", None)
        try:
            change = PolicyChange.model_validate(parse_json(await request.body()))
        except ValidationError as error:
            raise BadRequest(sentence(error)) from error
        return await self._administer("set_shadow", NamedPolicy(change.name, change.parameters))

    async def table(self, request: Request) -> Response:
        """Return the live routing table as a RoutingTable file; a PUT of one swaps it in."""
        if request.method == "PUT":
            return await self._administer("swap_table", await request.body())
        self.gate.check_key(request.headers)
        settings: Settings = await self._client.call("settings")
        if settings.table is None:
            raise BadRequest(
                "no routing table is live: GET /eldr/status says under `signatures` what is missing"
            )
        return Response(settings.table, media_type="application/octet-stream")

    async def swap_predictor(self, request: Request) -> Response:
        """Swap the signature predictor; the body is a SignaturePredictor file."""
        try:
            self._client.tokenizer = await self._tokens.fingerprint()
        except ValueError as error:
            raise BadRequest(str(error)) from error
        return await self._administer("swap_predictor", await request.body(), self._client.tokenizer)

    async def refit(self, request: Request) -> Response:
        """Fit a routing table to recent traffic and swap it in. The body is ignored."""
        try:
            return JSONResponse({"table": await self._pool.refit()})
        except SwapRefused as error:
            raise BadRequest(str(error)) from error

    async def trace(self, request: Request) -> Response:
        """Return the signature pool's samples as a CalibrationTrace file, which holds prompts' token ids."""
        self.gate.check_key(request.headers)
        try:
            tokenizer, vocabulary = await self._tokens.fingerprint(), await self._tokens.size()
        except ValueError:  # a trace without token ids needs none
            tokenizer, vocabulary = "", 0
        try:
            file = await self._pool.trace(tokenizer, vocabulary)
        except SwapRefused as error:
            raise BadRequest(str(error)) from error
        return Response(file, media_type="application/octet-stream")

    async def place_experts(self, request: Request) -> Response:
        """Bring the experts of decode engines to a placement while they serve, one engine after the other."""
        return JSONResponse(await place_everywhere(self._decode, await request.body()))

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
                "shadow": settings.shadow and asdict(settings.shadow),
                "settings_version": settings.version,
                "table_version": settings.table_version,
                "predictor_version": settings.predictor_version,
            }
        )


class _Streamed(Response):
    """Bytes from an engine as they come; when the client has gone, its engines are left at once.

    Args:
        tasks: gets the task that sends them.
        sent: called when all are sent.
    """

    def __init__(
        self,
        first: bytes,
        run: AsyncGenerator[bytes, None],
        headers: dict[str, str],
        tasks: list[asyncio.Task[Any]],
        sent: Callable[[], None],
    ) -> None:
        super().__init__(headers=headers, media_type="text/event-stream")
        del self.headers["content-length"]
        self._first, self._run, self._tasks, self._sent = first, run, tasks, sent

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
            self._sent()
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

        answer.__doc__ = getattr(EldrIngress, name).__doc__  # for the reference
        return answer

    async def models(request: Request) -> Response:
        """The model that is served, as OpenAI's list."""
        return JSONResponse({"object": "list", "data": [ingress().model_card]})

    async def model(request: Request) -> Response:
        """The same model by its name."""
        card = ingress().model_card
        if request.path_params["model"] != card["id"]:
            raise Refused(f"there is no model {request.path_params['model']!r}", status=404, param="model")
        return JSONResponse(card)

    async def openapi(request: Request) -> Response:
        """This service's OpenAPI document."""
        return JSONResponse(ingress().openapi)

    async def page(request: Request) -> Response:
        return HTMLResponse(live_page(), headers={"Content-Security-Policy": SELF_CONTAINED})

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
            Route("/health", endpoint("health")),
            Route("/ping", endpoint("health"), methods=["GET", "POST"]),
            Route("/version", endpoint("version")),
            Route("/metrics", endpoint("metrics")),
            Route("/eldr/status", endpoint("status")),
            Route("/eldr/ready", endpoint("ready")),
            Route("/eldr/policy", endpoint("set_policy"), methods=["PUT"]),
            Route("/eldr/shadow", endpoint("set_shadow"), methods=["PUT", "DELETE"]),
            Route("/eldr/", page),
            Route("/eldr/live", endpoint("live")),
            Route("/eldr/table", endpoint("table"), methods=["GET", "PUT"]),
            Route("/eldr/refit", endpoint("refit"), methods=["PUT"]),
            Route("/eldr/trace", endpoint("trace")),
            Route("/eldr/predictor", endpoint("swap_predictor"), methods=["PUT"]),
            Route("/eldr/experts", endpoint("place_experts"), methods=["PUT"]),
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
    return _named(request, refused_response(error))


async def _call_failed(request: Request, error: Any) -> Response:
    retry_after = {"Retry-After": "1"} if error.status == 503 else None
    return _named(request, Response(error.body, error.status, retry_after, "application/json"))


async def _channel_lost(request: Request, error: Any) -> Response:
    return _named(request, refusal(f"an engine was lost: {sentence(error)}", 503, 1))


async def _http_error(request: Request, error: Any) -> Response:
    return refusal(error.detail, error.status_code, headers=error.headers)


async def _fault(request: Request, error: Exception) -> Response:
    return _named(request, refusal("the ingress failed; its log says more", 500))


def _named(request: Request, response: Response) -> Response:
    """Under the request's name in the logs, if it has got one."""
    response.headers.update(getattr(request.state, "named", {}))
    return response


def _tracing(options: TracingOptions | None) -> Tracing | None:
    if options is None:
        return None
    from eldr_serve.serving.tracing import Tracing  # of OpenTelemetry, which is imported for a while

    return Tracing(options)


def decode_directory(application: str) -> str:
    """Under which this process's decode request router is found."""
    return f"{application}/decode"


def prefill_directory(application: str) -> str:
    """Under which this process's prefill request router is found."""
    return f"{application}/prefill"


def _headers_for_engines(request: Request) -> dict[str, str]:
    return {name: value for name, value in request.headers.items() if name not in _NOT_FOR_ENGINES}
