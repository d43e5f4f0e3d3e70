"""The OpenAI endpoints of an ingress: completions, and requests that a decode engine answers alone."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncGenerator, Callable
from typing import Any

from pydantic import ValidationError
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from eldr_serve.engine.keys import STEERING_HEADERS
from eldr_serve.errors import BadRequest, Overloaded, Refused, sentence
from eldr_serve.ingress.admission import parse_json
from eldr_serve.ingress.request_log import RequestLog
from eldr_serve.limits.tenants import Visit
from eldr_serve.pipeline.path import RequestPath
from eldr_serve.replicas.fleet import Fleet
from eldr_serve.request_fields import Asked, Generation, max_new_tokens, sequences, tenant_salt
from eldr_serve.router.client import RouterClient
from eldr_serve.router.messages import Answered
from eldr_serve.scheduling import Placement

DOMAIN_HEADER = "x-eldr-domain"
_NOT_FOR_ENGINES = {
    "authorization",
    "content-encoding",
    "content-length",
    "cookie",
    "host",
} | STEERING_HEADERS
_BYTES_A_TOKEN = 4  # assumed for a body until the prompt's tokens are counted


class OpenAIEndpoints:
    """Endpoints for inference requests.

    Args:
        decode: decode engines, for the endpoints that generate nothing.
        max_sequences: maximum number of answers to one request.
        model_card: description of the model in `GET /v1/models`.
        openapi: the OpenAPI document.
    """

    def __init__(
        self,
        *,
        path: RequestPath,
        client: RouterClient,
        decode: Fleet,
        log: RequestLog,
        max_sequences: int,
        model_card: dict[str, Any],
        openapi: dict[str, Any],
    ) -> None:
        self._path, self._client, self._decode, self._log = path, client, decode, log
        self._max_sequences, self._model_card, self._openapi = max_sequences, model_card, openapi

    async def generate(self, method: str, request: Request) -> Response:
        """Run a chat or text completion over prefill, placement and decode."""
        asked_at = time.monotonic()
        body = await request.body()
        asked = self._parse(body)
        count, most = sequences(asked), self._max_sequences
        if count > most:
            raise BadRequest(f"{count} answers (prompts x n) are requested, at most {most} are allowed")
        visit: Visit = request.state.visit
        visit.reserve(len(body) // _BYTES_A_TOKEN, count * max_new_tokens(asked))
        self._client.start()
        generation = _generation(method, request, body, asked)
        record = self._log.begin(request.scope["path"], visit.tenant.name, generation.headers)
        request.state.named = {"x-eldr-request": record.request_id}
        if record.trace_id:
            request.state.named["x-eldr-trace"] = record.trace_id
        streaming: list[asyncio.Task[Any]] = []

        def keep_lease(lease: Placement) -> None:
            visit.lease = lease

        def cut_off() -> None:
            self._client.count("slow_clients")
            for task in streaming:
                task.cancel()

        run = self._path.generate(generation, record, on_lease=keep_lease, on_overflow=cut_off)
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

        headers = request.state.named | _placement_headers(lease)
        if asked.stream and record.handover_s is not None:
            # A stream's headers leave with its first chunk; a whole answer's time would hold all its tokens.
            headers["x-eldr-handover-ms"] = f"{1000 * record.handover_s:.3f}"
        if asked.stream:
            return _Streamed(first, run, headers, streaming, answered)
        whole = b"".join([first, *[chunk async for chunk in run]])
        return Response(whole, 200, headers, "application/json")

    async def other(self, method: str, request: Request) -> Response:
        """Return the least loaded decode engine's answer to a request that generates nothing."""
        body = await request.body()
        salt = tenant_salt(request.state.visit.tenant.name, self._parse(body))
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

    async def models(self, request: Request) -> Response:
        """Return the served model as a list in OpenAI's format."""
        return JSONResponse({"object": "list", "data": [self._model_card]})

    async def model(self, request: Request) -> Response:
        """Return the served model if it has the requested name."""
        if request.path_params["model"] != self._model_card["id"]:
            raise _no_model(request.path_params["model"])
        return JSONResponse(self._model_card)

    async def openapi(self, request: Request) -> Response:
        """Return the service's OpenAPI document."""
        return JSONResponse(self._openapi)

    def _parse(self, body: bytes) -> Asked:
        fields = parse_json(body)
        if not isinstance(fields, dict):
            raise BadRequest("the body must be a JSON object")
        try:
            asked = Asked.model_validate(fields)
        except ValidationError as error:
            raise BadRequest(sentence(error), param=f"body.{error.errors()[0]['loc'][0]}") from error
        if asked.model and asked.model != self._model_card["id"]:
            raise _no_model(asked.model)
        return asked


def _generation(method: str, request: Request, body: bytes, asked: Asked) -> Generation:
    """Return the request as the pipeline takes it."""
    tenant = request.state.visit.tenant
    return Generation(
        method,
        body,
        asked,
        _headers_for_engines(request),
        request.headers.get(DOMAIN_HEADER),
        tenant.name,
        tenant.priority,
        tenant_salt(tenant.name, asked),
    )


def _placement_headers(lease: Placement) -> dict[str, str]:
    """Return response headers that name the decode worker, and how it was chosen."""
    return {
        "x-eldr-decode-worker": lease.replica,
        "x-eldr-band": str(lease.band),
        "x-eldr-policy": lease.policy,
    }


class _Streamed(Response):
    """A streaming response that ends the engine calls as soon as the client disconnects.

    Args:
        tasks: list to which the sending task is appended.
        sent: called when all bytes are sent.
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


def _no_model(name: str) -> Refused:
    return Refused(f"there is no model {name!r}", status=404, param="model")


def _headers_for_engines(request: Request) -> dict[str, str]:
    return {name: value for name, value in request.headers.items() if name not in _NOT_FOR_ENGINES}
