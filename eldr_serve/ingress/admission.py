"""Request admission: authentication, size, JSON syntax and the concurrency limit."""

from __future__ import annotations

import asyncio
import hmac
import math
import re
import zlib
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import pydantic_core
from pydantic import AnyHttpUrl, BaseModel, Field
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from eldr_serve.errors import BadRequest, Refused, error_body
from eldr_serve.ingress.audit import Audit
from eldr_serve.limits.concurrency import ConcurrencyLimiter
from eldr_serve.limits.keys import digest
from eldr_serve.limits.tenants import Tenants, TokenReservation

MIB = 2**20
_MAX_ARTIFACT_BYTES = 64 * MIB  # 512 workers x 96 layers x 256 experts as float32 is 48 MiB
_READ_METHODS = ("GET", "HEAD", "OPTIONS")
_PUBLIC_PATHS = ("/openapi.json", "/health", "/ping", "/version", "/metrics")
# Digits or an exponent, even in a string, that may exceed 64 bits: only then is each number checked.
_WIDE_NUMBER = re.compile(rb"\d{19}|[eE]\+?\d{3}")


class TracingOptions(BaseModel, frozen=True, extra="forbid"):
    """OpenTelemetry tracing of requests."""

    endpoint: AnyHttpUrl = Field(
        description="URL of a collector that accepts OTLP over HTTP, such as http://collector:4318/v1/traces"
    )
    sample: float = Field(
        default=1.0,
        ge=0,
        le=1,
        description="share of requests that are traced; if a request has a `traceparent` header, its "
        "sampled flag decides",
    )


class IngressOptions(BaseModel, frozen=True, extra="forbid"):
    """Options of one ingress replica."""

    port: int | None = Field(
        default=None,
        ge=0,
        le=65535,
        description="port of each ingress replica's own HTTP server, which bypasses Serve's proxy; replicas "
        "of one node share it; none: Serve's proxy alone",
    )
    host: str = Field(default="127.0.0.1", description="address of that server; 0.0.0.0: all interfaces")
    max_in_flight: int = Field(
        default=4096, ge=1, description="maximum requests in one ingress replica; more get 429 before prefill"
    )
    max_body_mib: float = Field(
        default=16.0, gt=0, description="maximum size of a request's body, MiB; a larger one gets 413"
    )
    body_timeout_s: float = Field(
        default=30.0, gt=0, description="time for a request's body to arrive, s; a slower one gets 408"
    )
    max_sequences: int = Field(
        default=256, ge=1, description="maximum answers to one request (prompts x n); more get 400"
    )
    keys_file: Path | None = Field(
        default=None,
        description="inference keys, tenants and their limits (`eldr keys`), on each node of the ingress; "
        "read again when it changes; none: no key is required",
    )
    max_wait_s: float = Field(
        default=5.0,
        ge=0,
        description="maximum wait of a tenant's request for admission before it gets 429, s; without "
        "keys_file, none waits",
    )
    max_waiting: int = Field(
        default=1024, ge=1, description="maximum requests that wait for admission in one ingress replica"
    )
    max_connections: int = Field(
        default=16384, ge=1, description="maximum open connections to one replica's port; more are closed"
    )
    head_timeout_s: float = Field(
        default=30.0, gt=0, description="time for a request's line and headers to arrive at the port, s"
    )
    write_timeout_s: float = Field(
        default=60.0,
        gt=0,
        description="a connection to the port is closed if its client accepts no data for this time, s",
    )
    log_requests: Literal["failed", "all"] = Field(
        default="failed",
        description="which requests for generated text get a line of JSON in the log when they end: those "
        "with a failure, even if they were answered, or all",
    )
    tracing: TracingOptions | None = Field(
        default=None, description="one span per request and per stage of it; none: no tracing"
    )


class Gate:
    """Authentication and the concurrency limit of one ingress replica.

    Args:
        admin_key_sha256: SHA-256 (hex) of the admin key; if None, requests that need it are refused.
        count: callback that counts an event of this name for /eldr/status.

    Raises:
        KeysError: the keys file is invalid.
    """

    def __init__(
        self, options: IngressOptions, admin_key_sha256: str | None, count: Callable[[str], None]
    ) -> None:
        self.options = options
        self.tenants = Tenants(options.keys_file)
        self.limiter = ConcurrencyLimiter(options.max_in_flight, options.max_waiting, options.max_wait_s)
        self.count = count
        self._admin_key_sha256 = admin_key_sha256

    @property
    def in_flight(self) -> int:
        """Return the number of admitted requests that have not ended."""
        return self.limiter.in_flight

    def check_key(self, headers: Headers) -> None:
        """Raise Refused unless the headers carry the admin key."""
        if self._admin_key_sha256 is None:
            raise Refused("no admin key is configured: set ELDR_ADMIN_KEY where the app is built", status=403)
        if not self.is_operator(headers):
            raise Refused("the admin key is missing or wrong: send Authorization: Bearer KEY", status=401)

    def is_operator(self, headers: Headers) -> bool:
        """Return whether the headers carry the admin key."""
        given = headers.get("authorization", "").removeprefix("Bearer ")
        return hmac.compare_digest(digest(given), self._admin_key_sha256 or "")


class Admission:
    """ASGI middleware around all endpoints. Refused requests do not reach the endpoints.

    Every POST may reach an engine; it counts towards the concurrency limit until its answer has ended.
    Requests that change the service (/eldr) need the admin key, which is checked before the body is read.
    They do not count towards the limit, so that a full service can still be operated, and they are written to
    the audit log. All other requests need a tenant's key, if keys are configured, and count towards the
    tenant's limits. Without a key a client may read the OpenAPI document, health, version and metrics of the
    process, and the parts of /eldr that do not need the admin key.

    The state of an admitted request has its `reservation` of tokens, which the endpoint makes.

    Args:
        gate: returns the gate of the running ingress replica.
    """

    def __init__(self, app: ASGIApp, gate: Callable[[], Gate]) -> None:
        self._app = app
        self._gate = gate

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        gate, headers = self._gate(), Headers(scope=scope)
        administrative = scope["path"].startswith("/eldr/")
        try:
            if scope["path"] in _PUBLIC_PATHS:
                await self._app(scope, receive, send)
            elif scope["method"] in _READ_METHODS:
                if not administrative:
                    gate.tenants.find(headers.get("authorization", "")).admit()
                await self._app(scope, receive, send)
            elif administrative:
                await self._administer(gate, headers, scope, receive, send)
            else:
                await self._serve(gate, headers, scope, receive, send)
        except Refused as refused:
            if refused.status == 429:
                gate.count("refused_overload" if refused.kind is None else "refused_limits")
            await refused_response(refused)(scope, receive, send)
        except ClientDisconnect:
            return

    async def _serve(self, gate: Gate, headers: Headers, scope: Scope, receive: Receive, send: Send) -> None:
        tenant = gate.tenants.find(headers.get("authorization", ""))
        tenant.admit()
        limit = int(gate.options.max_body_mib * MIB)
        body = await _read(headers, receive, limit, gate.options.body_timeout_s)
        reservation = TokenReservation(tenant)
        scope.setdefault("state", {})["reservation"] = reservation

        async def admitted() -> None:
            async with gate.limiter.permit(tenant):
                try:
                    await self._app(scope, _replay(body), send)
                finally:
                    reservation.settle()

        await _unless_disconnected(receive, admitted())

    async def _administer(
        self, gate: Gate, headers: Headers, scope: Scope, receive: Receive, send: Send
    ) -> None:
        record = Audit(scope, headers)
        try:
            gate.check_key(headers)
            body = await _read(headers, receive, _MAX_ARTIFACT_BYTES, gate.options.body_timeout_s)
            record.record_request(headers, body)
            await _unless_disconnected(receive, self._app(scope, _replay(body), record.capture_status(send)))
        except Refused as refused:
            record.status = refused.status
            raise
        finally:
            record.write()


async def _read(headers: Headers, receive: Receive, limit: int, timeout_s: float) -> bytes:
    """Return the whole body, decompressed.

    Raises:
        Refused: the body is larger than `limit` bytes (raised as soon as that is known), arrives too slowly,
            or has a compression other than gzip.
    """
    encoding = headers.get("content-encoding", "").strip().lower() or "identity"
    if encoding not in ("identity", "gzip", "x-gzip"):
        raise Refused(
            f"content-encoding {encoding[:40]!r} is not supported: send the body plain or as gzip", status=415
        )
    declared = headers.get("content-length", "")
    size = int(declared) if re.fullmatch(r"[0-9]{1,18}", declared) else 0
    body, more = bytearray(), True
    try:
        async with asyncio.timeout(timeout_s):
            while more and max(size, len(body)) <= limit:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientDisconnect
                body += message.get("body", b"")
                more = message.get("more_body", False)
    except TimeoutError:
        raise Refused(f"the request's body did not arrive within {timeout_s:g} s", status=408) from None
    if encoding != "identity" and len(body) <= limit:
        body = await asyncio.to_thread(_decompressed, bytes(body), limit)
    if max(size, len(body)) > limit:
        raise Refused(f"the request's body is larger than {limit / MIB:g} MiB", status=413)
    return bytes(body)


def _decompressed(body: bytes, limit: int) -> bytearray:
    """Return the decompressed body, at most one byte longer than `limit`."""
    found = bytearray()
    try:
        while body and len(found) <= limit:
            member = zlib.decompressobj(wbits=16 + zlib.MAX_WBITS)
            found += member.decompress(body, limit + 1 - len(found))
            if not member.eof and len(found) <= limit:
                raise zlib.error("it ends early")
            body = member.unused_data
    except zlib.error as error:
        raise BadRequest(f"the body is not valid gzip, unlike its content-encoding: {error}") from error
    return found


def _replay(body: bytes) -> Receive:
    """Return an ASGI `receive` that yields this body."""

    async def replayed() -> Message:
        return {"type": "http.request", "body": body, "more_body": False}

    return replayed


async def _unless_disconnected(receive: Receive, answer: Awaitable[None]) -> None:
    """Await the answer; cancel it if the client disconnects first."""
    answering = asyncio.ensure_future(answer)
    disconnected = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait([answering, disconnected], return_when=asyncio.FIRST_COMPLETED)
    finally:
        disconnected.cancel()
        answering.cancel()  # does nothing if it is done
        with suppress(asyncio.CancelledError):
            await answering


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


# -- JSON ----------------------------------------------------------------------------------------


def parse_json(body: bytes) -> Any:
    """Return the value of a JSON text that every engine and every answer can represent.

    NaN and Infinity are not JSON, and a lone surrogate is not Unicode. Numbers must fit in 64 bits, and the
    parser allows 200 levels of nesting.

    Raises:
        BadRequest: the body is not such JSON; one sentence.
    """
    try:
        value = pydantic_core.from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise BadRequest(f"the body is not valid JSON: {error}") from error
    if _WIDE_NUMBER.search(body):
        _check_numbers(value)
    return value


def _check_numbers(value: Any) -> None:
    pending = [value]
    while pending:
        found = pending.pop()
        if isinstance(found, dict):
            pending += found.values()
        elif isinstance(found, list):
            pending += found
        elif found in (math.inf, -math.inf) or (isinstance(found, int) and not _fits_64_bits(found)):
            raise BadRequest("a number in the body does not fit in 64 bits")


def _fits_64_bits(number: int) -> bool:
    return -(2**63) <= number < 2**63


# -- responses -----------------------------------------------------------------------------------


def refusal(
    message: str,
    status: int,
    retry_after_s: int | None = None,
    kind: str | None = None,
    param: str | None = None,
    headers: Mapping[str, str] | None = None,
) -> Response:
    """Return an OpenAI-like error response."""
    retry_after = {"Retry-After": str(retry_after_s)} if retry_after_s is not None else {}
    body = error_body(message, status, kind, param)
    return Response(body, status, {**retry_after, **(headers or {})}, "application/json")


def refused_response(error: Refused) -> Response:
    """Return the response to a refused request."""
    return refusal(str(error), error.status, error.retry_after_s, error.kind, error.param)
