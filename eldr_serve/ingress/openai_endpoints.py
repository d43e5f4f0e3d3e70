"""The inference endpoints of an ingress: generation, and requests that a decode engine answers alone."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError
from starlette.requests import Request as HTTPRequest
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from eldr_serve.engine.calls import STEERING_HEADERS
from eldr_serve.engine.protocol import EngineRequest
from eldr_serve.errors import BadRequestError, RequestRefusedError, one_line_message
from eldr_serve.ingress.admission import AdmittedState
from eldr_serve.ingress.body import parse_json
from eldr_serve.ingress.request_log import RequestLog
from eldr_serve.metrics import IngressEvent
from eldr_serve.monitoring.ingress_counters import IngressCounters
from eldr_serve.objective import objective_of
from eldr_serve.pipeline.context.request_context import RequestContext
from eldr_serve.pipeline.path import RequestPath
from eldr_serve.request import (
    PolicyHints,
    Request,
    RequestFields,
    max_new_tokens,
    num_sequences,
    tenant_salt,
)
from eldr_serve.router_client.client import RouterClient
from eldr_serve.router_protocol.messages import StreamLatencies

if TYPE_CHECKING:
    from eldr_serve.ingress.tracing import Tracing

_NOT_FOR_ENGINES = {
    "authorization",
    "content-encoding",
    "content-length",
    "cookie",
    "host",
    "x-api-key",
} | STEERING_HEADERS
_RANK_HEADER, _RANK_FIELD = "x-data-parallel-rank", "data_parallel_rank"
_COMPUTED = ("embeddings", "score", "rerank")  # methods that generate nothing, but run the model
_BYTES_PER_TOKEN = 4  # assumed bytes of a body per token until the prompt's tokens are counted


class OpenAIEndpoints:
    """Endpoints for inference requests.

    Args:
        request_path: runs requests through the prefill and decode deployments.
        router: client of the router, started by the first request.
        counters: counters of this ingress.
        log: request log.
        tracing: traces of the requests; if None, no request is traced.
        max_sequences: maximum number of answers to one request.
        model_cards: the model and its adapters as `GET /v1/models` describes them, the model first.
        openapi: the OpenAPI document.
    """

    def __init__(
        self,
        *,
        request_path: RequestPath,
        router: RouterClient,
        counters: IngressCounters,
        log: RequestLog,
        tracing: Tracing | None,
        max_sequences: int,
        model_cards: list[dict[str, Any]],
        openapi: dict[str, Any],
    ) -> None:
        self._request_path = request_path
        self._router = router
        self._counters = counters
        self._log = log
        self._tracing = tracing
        self._max_sequences = max_sequences
        self._model_cards = {card["id"]: card for card in model_cards}
        self._base_model = next(iter(self._model_cards))
        self._openapi = openapi

    async def generate(self, method: str, request: HTTPRequest) -> Response:
        """Run a chat, text completion or message through prefill, placement and decode."""
        body = await request.body()
        fields = self._parse(request, body)
        state = AdmittedState.get(request)
        prompt_tokens, num_answers = len(body) // _BYTES_PER_TOKEN, self._count_answers(fields)
        state.reservation.reserve(prompt_tokens + num_answers * max_new_tokens(fields))
        self._router.start()
        sending = _SendingTask(self._counters)
        adapter = "" if fields.model == self._base_model else fields.model or ""
        pipeline_request = _request(method, request, body, fields, adapter)
        context = self._begin(pipeline_request, request.scope["path"], sending.cancel)
        state.reservation.count_usage_with(partial(context.used_tokens, prompt_tokens))
        state.id_headers = _id_headers(context)
        run = self._request_path.generate(context)
        try:
            first = await anext(run)
            headers = state.id_headers | _placement_headers(context)
            if fields.stream:
                record_latencies = self._latency_recorder(context, state.arrived_at_s, num_answers)
                return _Streamed(first, run, headers, sending, record_latencies)
            content = b"".join([first, *[chunk async for chunk in run]])
            return Response(content, 200, headers, "application/json")
        except BaseException:
            await run.aclose()
            raise

    def _begin(self, request: Request, url_path: str, on_overflow: Callable[[], None]) -> RequestContext:
        """Return the context of a request, whose end writes the log and ends the trace."""
        if self._tracing is None:
            return RequestContext(request, url_path, self._log.write, on_overflow)
        trace = self._tracing.begin(url_path, request.headers)
        request.headers.update(trace.headers)

        def end(context: RequestContext) -> None:
            self._log.write(context)
            trace.end(context)

        return RequestContext(request, url_path, end, on_overflow, trace_id=trace.id)

    def _count_answers(self, fields: RequestFields) -> int:
        """Return the number of answers to a request; raise BadRequestError if that is too many."""
        count = num_sequences(fields)
        if count > self._max_sequences:
            raise BadRequestError(
                f"{count} answers (prompts x n) were requested; at most {self._max_sequences} are allowed"
            )
        return count

    def _latency_recorder(
        self, context: RequestContext, arrived_at_s: float, num_answers: int
    ) -> Callable[[], None]:
        """Return a function that reports the latencies of a stream that begins now; call it at the end."""
        first_lease, first_token_at_s = context.lease, time.monotonic()

        def record() -> None:
            lease = context.lease or first_lease  # another one if the stream was resumed
            assert lease is not None
            tokens = lease.generated_tokens
            has_tpot = num_answers == 1 and tokens > 1  # several answers grow at the same time
            tpot_s = (time.monotonic() - first_token_at_s) / (tokens - 1) if has_tpot else None
            self._router.record_stream(StreamLatencies(first_token_at_s - arrived_at_s, tpot_s))

        return record

    async def forward(self, method: str, request: HTTPRequest) -> Response:
        """Return the least loaded decode engine's answer to a request that generates nothing."""
        body = await request.body()
        reservation = AdmittedState.get(request).reservation
        salt = tenant_salt(reservation.tenant.name, self._parse(request, body))
        if method in _COMPUTED:
            prompt_tokens = len(body) // _BYTES_PER_TOKEN
            reservation.reserve(prompt_tokens)
            reservation.count_usage_with(lambda: prompt_tokens)
        engine_request = EngineRequest(method, body, headers=_headers_for_engines(request), cache_salt=salt)
        return Response(await self._request_path.forward(engine_request), media_type="application/json")

    async def models(self, request: HTTPRequest) -> Response:
        """Return the served model and its adapters as a list in OpenAI's format."""
        return JSONResponse({"object": "list", "data": list(self._model_cards.values())})

    async def model(self, request: HTTPRequest) -> Response:
        """Return the served model or adapter that has the requested name."""
        name = request.path_params["model"]
        if name not in self._model_cards:
            raise _no_model(name)
        return JSONResponse(self._model_cards[name])

    async def openapi(self, request: HTTPRequest) -> Response:
        """Return the service's OpenAPI document."""
        return JSONResponse(self._openapi)

    def _parse(self, request: HTTPRequest, body: bytes) -> RequestFields:
        fields = parse_json(body)
        if not isinstance(fields, dict):
            raise BadRequestError("the body must be a JSON object")
        for name, source in ((_RANK_HEADER, request.headers), (_RANK_FIELD, fields)):
            if (rank := source.get(name)) is not None:
                raise BadRequestError(
                    f"{name} {str(rank)[:40]!r} is not supported, because the router chooses the "
                    "rank: leave it out",
                    param=name,
                )
        try:
            fields = RequestFields.model_validate(fields)
        except ValidationError as error:
            raise BadRequestError(
                one_line_message(error), param=f"body.{error.errors()[0]['loc'][0]}"
            ) from error
        if fields.model and fields.model not in self._model_cards:
            raise _no_model(fields.model)
        return fields


def _request(method: str, request: HTTPRequest, body: bytes, fields: RequestFields, adapter: str) -> Request:
    """Return the request as the pipeline takes it."""
    tenant = AdmittedState.get(request).reservation.tenant
    return Request(
        method=method,
        body=body,
        fields=fields,
        adapter=adapter,
        headers=_headers_for_engines(request),
        hints=PolicyHints.from_headers(request.headers),
        tenant=tenant.name,
        priority=tenant.priority,
        cache_salt=tenant_salt(tenant.name, fields),
        objective=objective_of(request.headers, tenant.objective),
    )


def _id_headers(context: RequestContext) -> dict[str, str]:
    """Return response headers with the ids of the request and of its trace."""
    trace = {"x-eldr-trace": context.trace_id} if context.trace_id else {}
    return {"x-eldr-request": context.request_id} | trace


def _placement_headers(context: RequestContext) -> dict[str, str]:
    """Return response headers that name the decode worker, and how it was chosen and reached."""
    lease = context.lease
    assert lease is not None
    headers = {
        "x-eldr-decode-worker": lease.worker,
        "x-eldr-candidates": str(lease.num_candidates),
        "x-eldr-policy": lease.policy,
    }
    if context.request.fields.stream and context.record.handover_s is not None:
        # Only for streams: an unstreamed answer comes after its last token, so its hand-over includes decode.
        headers["x-eldr-handover-ms"] = f"{1000 * context.record.handover_s:.3f}"
    return headers


class _SendingTask:
    """The task that sends a stream once it has begun; it is cancelled if the client reads too slowly."""

    def __init__(self, counters: IngressCounters) -> None:
        self._counters = counters
        self._task: asyncio.Task[Any] | None = None

    def begin(self) -> None:
        """Make the current task the one that sends."""
        self._task = asyncio.current_task()

    def cancel(self) -> None:
        """Count a slow client, and end the task."""
        self._counters.count(IngressEvent.SLOW_CLIENTS)
        if self._task is not None:
            self._task.cancel()


class _Streamed(Response):
    """A streaming response that ends the engine calls as soon as the client disconnects.

    Args:
        on_sent: called when all bytes are sent.
    """

    def __init__(
        self,
        first: bytes,
        run: AsyncGenerator[bytes, None],
        headers: dict[str, str],
        sending: _SendingTask,
        on_sent: Callable[[], None],
    ) -> None:
        super().__init__(headers=headers, media_type="text/event-stream")
        del self.headers["content-length"]
        self._first = first
        self._run = run
        self._sending = sending
        self._on_sent = on_sent

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._sending.begin()
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await send({"type": "http.response.body", "body": self._first, "more_body": True})
            async for chunk in self._run:
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
            await send({"type": "http.response.body", "body": b""})
            self._on_sent()
        finally:
            await self._run.aclose()


def _no_model(name: str) -> RequestRefusedError:
    sentence = f"there is no model {name!r}: GET /v1/models lists the models"
    return RequestRefusedError(sentence, status=404, param="model")


def _headers_for_engines(request: HTTPRequest) -> dict[str, str]:
    return {name: value for name, value in request.headers.items() if name not in _NOT_FOR_ENGINES}
