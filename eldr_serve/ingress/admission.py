"""Request admission: keys, limits of tenants, size of the body, and the concurrency limit."""

from __future__ import annotations

import asyncio
import hmac
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from eldr_serve.errors import RequestRefusedError
from eldr_serve.ingress.audit import Audit
from eldr_serve.ingress.body import MIB, BodyBudget, BodyShare, read_body
from eldr_serve.ingress.options import IngressOptions
from eldr_serve.ingress.responses import adapt_to_api, refused_response
from eldr_serve.limits.concurrency import ConcurrencyLimiter
from eldr_serve.limits.keys import bearer_key, digest
from eldr_serve.limits.tenants import Tenant, Tenants, TokenReservation
from eldr_serve.metrics import IngressEvent
from eldr_serve.monitoring.ingress_counters import IngressCounters

_MAX_ARTIFACT_BYTES = 64 * MIB  # 512 workers x 96 layers x 256 experts as float32 is 48 MiB
_READ_METHODS = ("GET", "HEAD", "OPTIONS")
_AUDITED_READS = ("/eldr/trace",)  # it returns token ids, from which prompts can be read


class Gate:
    """Authenticates the requests of one ingress replica, and limits how many it handles at once.

    Args:
        admin_key_sha256: SHA-256 (hex) of the admin key; if None, requests that need it are refused.
        counters: counters of the ingress.

    Raises:
        KeysError: the keys file is invalid.
    """

    def __init__(
        self, options: IngressOptions, admin_key_sha256: str | None, counters: IngressCounters
    ) -> None:
        self.options = options
        self.tenants = Tenants(options.keys_file)
        self.limiter = ConcurrencyLimiter(options.max_in_flight, options.max_waiting, options.max_wait_s)
        self.bodies = BodyBudget(
            int(options.max_pending_mib * MIB),
            on_refusal=partial(counters.count, IngressEvent.REFUSED_PENDING_BODIES),
        )
        self._counters = counters
        self._admin_key_sha256 = admin_key_sha256

    @property
    def in_flight(self) -> int:
        """Return the number of admitted requests that have not ended."""
        return self.limiter.in_flight

    def count_refusal(self, refused: RequestRefusedError) -> None:
        """Count a request that the concurrency limit or a limit of its tenant refuses."""
        if refused.status == 429:
            event = IngressEvent.REFUSED_LIMITS if refused.kind else IngressEvent.REFUSED_OVERLOAD
            self._counters.count(event)

    def admit(self, headers: Headers) -> Tenant:
        """Return the tenant of a request; raise RequestRefusedError if its key or rate does not allow it."""
        tenant = self.tenants.find(_credentials(headers))
        tenant.admit()
        return tenant

    @asynccontextmanager
    async def read_body(self, headers: Headers, receive: Receive) -> AsyncIterator[bytes]:
        """Read a request's body, which counts towards the budget of bodies until the block ends."""
        limit = int(self.options.max_body_mib * MIB)
        with BodyShare(self.bodies) as share:
            body = await read_body(headers, receive, limit, self.options.body_timeout_s, share.add)
            share.reduce_to(len(body))
            yield body

    async def read_artifact(self, headers: Headers, receive: Receive) -> bytes:
        """Read the body of an operator's request, such as a table; it counts towards no budget."""
        return await read_body(headers, receive, _MAX_ARTIFACT_BYTES, self.options.body_timeout_s)

    def require_admin_key(self, headers: Headers) -> None:
        """Raise RequestRefusedError unless the headers carry the admin key."""
        if self._admin_key_sha256 is None:
            raise RequestRefusedError(
                "no admin key is configured: set ELDR_ADMIN_KEY where the app is built", status=403
            )
        if not self.is_operator(headers):
            raise RequestRefusedError(
                "the admin key is missing or wrong: send Authorization: Bearer KEY", status=401
            )

    def is_operator(self, headers: Headers) -> bool:
        """Return whether the headers carry the admin key."""
        key = bearer_key(headers.get("authorization", ""))
        return key is not None and hmac.compare_digest(digest(key), self._admin_key_sha256 or "")


@dataclass
class AdmittedState:
    """The state of an admitted request, for the middleware, the endpoint and the error response.

    Attributes:
        reservation: tokens of the tenant's limit, which the endpoint reserves.
        id_headers: response headers with the ids of the request; empty until it has them.
        arrived_at_s: time at which the request's headers had arrived, before its body and its permit,
            time.monotonic().
    """

    reservation: TokenReservation
    id_headers: dict[str, str] = field(default_factory=dict)
    arrived_at_s: float = field(default_factory=time.monotonic)

    @staticmethod
    def get(request: Request) -> AdmittedState:
        """Return the state of a request that counts towards its tenant's limits."""
        state: AdmittedState = request.state.admitted
        return state

    @staticmethod
    def find(request: Request) -> AdmittedState | None:
        """Return the state of any request; None if it counts towards no limits or was refused."""
        state: AdmittedState | None = getattr(request.state, "admitted", None)
        return state


class AdmissionMiddleware:
    """ASGI middleware around all endpoints. Refused requests do not reach the endpoints.

    Every POST may reach an engine, so it counts towards the concurrency limit until its answer has ended.
    Requests that change the service (/eldr) or read its traffic need the admin key, which is checked before
    the body is read. They are written to the audit log. They do not count towards the limit, so that
    operators can still use a full service. All other requests need a tenant's key, if keys are configured,
    and count towards the tenant's limits. Without a key, a client may read the OpenAPI document, health,
    version and metrics of the process, and the parts of /eldr that do not need the admin key.

    ASGI's state of an admitted request contains its AdmittedState.

    Args:
        gate: returns the gate of the running ingress replica.
        public_paths: paths that need no key.
    """

    def __init__(self, app: ASGIApp, gate: Callable[[], Gate], public_paths: Collection[str]) -> None:
        self._app = app
        self._gate = gate
        self._public_paths = public_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        gate = self._gate()
        headers = Headers(scope=scope)
        path = scope["path"].removeprefix(scope.get("root_path", ""))  # it contains Serve's route_prefix
        administrative = path.startswith("/eldr/")
        try:
            if path in _AUDITED_READS or (administrative and scope["method"] not in _READ_METHODS):
                await self._administer(gate, headers, scope, receive, send)
            elif administrative or path in self._public_paths:  # endpoints for operators check the key
                await self._app(scope, receive, send)
            elif scope["method"] in _READ_METHODS:
                gate.admit(headers)
                await self._app(scope, receive, send)
            else:
                await self._serve(gate, headers, scope, receive, send)
        except RequestRefusedError as refused:
            gate.count_refusal(refused)
            await adapt_to_api(path, refused_response(refused))(scope, receive, send)
        except ClientDisconnect:
            return

    async def _serve(self, gate: Gate, headers: Headers, scope: Scope, receive: Receive, send: Send) -> None:
        tenant = gate.admit(headers)
        reservation = TokenReservation(tenant)
        scope.setdefault("state", {})["admitted"] = AdmittedState(reservation)

        async def answer_if_admitted(receive: Receive) -> None:
            async with gate.limiter.permit(tenant):
                try:
                    await self._app(scope, receive, send)
                finally:
                    reservation.settle()

        async with gate.read_body(headers, receive) as body:
            await _cancel_if_disconnected(receive, body, answer_if_admitted)

    async def _administer(
        self, gate: Gate, headers: Headers, scope: Scope, receive: Receive, send: Send
    ) -> None:
        record = Audit(scope, headers)
        try:
            gate.require_admin_key(headers)
            body = await gate.read_artifact(headers, receive)
            record.record_request(headers, body)
            recorded_send = record.capture_status(send)
            await _cancel_if_disconnected(
                receive, body, lambda receive: self._app(scope, receive, recorded_send)
            )
        except RequestRefusedError as refused:
            record.status = refused.status
            raise
        finally:
            record.write()


def _credentials(headers: Headers) -> str:
    """Return the Authorization header; Anthropic's clients send a key as `x-api-key`."""
    key = headers.get("x-api-key")
    return headers.get("authorization", "" if key is None else f"Bearer {key}")


async def _cancel_if_disconnected(
    receive: Receive, body: bytes, answer: Callable[[Receive], Awaitable[None]]
) -> None:
    """Await the answer to a body that has been read; cancel it if the client disconnects first.

    Args:
        answer: gets an ASGI `receive` that returns the body once, and then waits for the disconnection.
    """
    disconnection = asyncio.ensure_future(_wait_for_disconnection(receive))
    unread: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive_again() -> Message:
        return unread.pop() if unread else await asyncio.shield(disconnection)

    answering = asyncio.ensure_future(answer(receive_again))
    try:
        await asyncio.wait([answering, disconnection], return_when=asyncio.FIRST_COMPLETED)
    finally:
        disconnection.cancel()
        answering.cancel()  # this has no effect on a task that is done
        with suppress(asyncio.CancelledError):
            await answering


async def _wait_for_disconnection(receive: Receive) -> Message:
    """Wait until the client disconnects; return the message."""
    while (message := await receive())["type"] != "http.disconnect":
        pass
    return message
