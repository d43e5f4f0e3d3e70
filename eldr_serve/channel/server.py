"""The listening port on which an engine or the router takes calls from ingress replicas."""

from __future__ import annotations

import asyncio
import hmac
import logging
import socket
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, Protocol

import msgspec

from eldr_serve.channel.frames import (
    HEAD,
    MAX_FRAME_BYTES,
    MAX_HELLO_BYTES,
    VERSION,
    BrokenFrameError,
    Kind,
    frame,
)
from eldr_serve.channel.peer import Peer

logger = logging.getLogger(__name__)

_HELLO_S = 5.0
_LINGER_S = 0.25  # a draining server waits this long for frames that are still in transit
_MAX_UNSENT_BYTES = 64 * 2**20
SILENT_S = 10.0  # an ingress under load may be late; a dead ingress is detected by its closed connection


class Reply:
    """Sends the reply to one call.

    Attributes:
        call: number of the call on its connection.
        engine_report: report on the call, sent with its end; values that msgpack can encode.
    """

    def __init__(self, connection: ServerConnection, call: int) -> None:
        self._connection = connection
        self.call = call
        self.engine_report: dict[str, Any] = {}

    @property
    def peer(self) -> Peer:
        """Return the connection to the caller."""
        return self._connection

    def send(self, payload: bytes, tokens: int = 0, ids: bytes = b"") -> None:
        """Send a part of the reply.

        Args:
            tokens: number of generated tokens in it.
            ids: uint32 ids of all these tokens, or empty.
        """
        kind = Kind.TOKENS if ids else Kind.DATA
        self._connection.send(HEAD.pack(len(ids) + len(payload), kind, self.call, tokens), ids, payload)


# Handles a call, given its method, header and body, and sends its reply.
Handler = Callable[[str, dict[str, Any], bytes, Reply], Awaitable[None]]
# Returns the HTTP status and the body of the response to a failed call, given its method and exception.
ErrorResponse = Callable[[str, Exception], tuple[int, bytes]]


class OpenCallHandler(Protocol):
    """Handles an open call until the caller closes it or the connection is lost."""

    def on_note(self, payload: bytes, tokens: int) -> None:
        """Process a message of the caller; raise msgspec.DecodeError if it is malformed."""

    def on_close(self, tokens: int) -> None:
        """Process the end of the call, with the final number of generated tokens."""

    def on_lost(self) -> None:
        """Process the loss of the connection."""


# Begins an open call, given its body; raises an exception to refuse the call.
OpenMethod = Callable[[bytes, Reply], OpenCallHandler]


class ChannelServer:
    """Accepts connections of ingress replicas and runs their calls.

    The calls of a connection are cancelled if it breaks, is silent for too long, or does not read its data.

    Args:
        secret: shared secret that a peer must present.
        handler: handles calls.
        error_response: returns the HTTP status and the response body for a method and its exception.
        max_calls: maximum number of calls of `limited_methods` in flight.
        limited_methods: methods whose calls are limited; None: all.
        full_error: returns the exception with which a call beyond the maximum fails.
        open_methods: functions that begin the open calls, by method.
        report: returns the status report for a ping, in types that msgpack can encode; empty by default.

    Attributes:
        connections: the open connections.
        open_methods: see Args.
        is_suspended: whether new connections are refused now.
        is_leaving: whether peers are asked to send no further calls.
    """

    def __init__(
        self,
        secret: str,
        handler: Handler,
        *,
        error_response: ErrorResponse,
        max_calls: int,
        limited_methods: Collection[str] | None = None,
        full_error: Callable[[], Exception],
        open_methods: Mapping[str, OpenMethod] = MappingProxyType({}),
        report: Callable[[], dict[str, Any]] = dict,
    ) -> None:
        self._report = report
        self._secret = secret.encode()
        self._handler = handler
        self._error_response = error_response
        self._max_calls = max_calls
        self._limited_methods = limited_methods
        self._full_error = full_error
        self._server: asyncio.Server | None = None
        self.connections: set[ServerConnection] = set()
        self.open_methods = open_methods
        self.is_suspended = self.is_leaving = False
        self._idle = asyncio.Event()
        self._idle.set()
        self._in_flight: Counter[str] = Counter()  # calls of each method

    async def start(self, host: str) -> int:
        """Listen on a free port of `host` and return the port."""
        self._server = await asyncio.get_running_loop().create_server(
            lambda: ServerConnection(self), host, 0, family=socket.AF_UNSPEC
        )
        return self.address[1]

    @property
    def address(self) -> tuple[str, int]:
        """Return host and port, after `start`."""
        assert self._server is not None
        host, port = self._server.sockets[0].getsockname()[:2]
        return host, port

    @property
    def num_peers(self) -> int:
        """Return the number of connections that have presented the secret."""
        return sum(connection.is_authenticated for connection in self.connections)

    @property
    def in_flight(self) -> int:
        """Return the number of calls that are being handled."""
        return self._in_flight.total()

    def count_calls(self, methods: Iterable[str]) -> int:
        """Return the number of calls of these methods that are being handled."""
        return sum(self._in_flight[method] for method in methods)

    def leave(self) -> None:
        """Ask present and later peers to send no further calls, and to move the open answers."""
        self.is_leaving = True
        for connection in list(self.connections):  # sending may close a connection
            connection.send(frame(Kind.LEAVING))

    async def drain(self) -> None:
        """Refuse further connections, leave, and wait for the open calls.

        Also wait for calls that peers sent before they learnt of the drain, and for the last replies to
        arrive.
        """
        if self._server is not None:
            self._server.close()
        self.leave()
        idle = False
        while not idle:
            await self._idle.wait()
            await asyncio.sleep(_LINGER_S)
            idle = self._idle.is_set()

    def suspend(self, reason: str) -> None:
        """Close all connections, and refuse new ones until `resume`; peers treat this server as lost."""
        self.is_suspended = True
        for connection in list(self.connections):
            connection.is_close_logged = True  # the caller logs it
            connection.close(reason)

    def resume(self) -> None:
        """Accept connections again."""
        self.is_suspended = False

    async def stop(self) -> None:
        """Close all connections."""
        if self._server is not None:
            self._server.close()
        for connection in list(self.connections):
            connection.close("the server stops")

    def ping(self) -> bytes:
        """Return a keepalive frame with the status report."""
        report = self._report()
        return frame(Kind.PING, payload=msgspec.msgpack.encode(report) if report else b"")

    def accepts_secret(self, secret: bytes) -> bool:
        """Return whether `secret` is this server's secret."""
        return hmac.compare_digest(secret, self._secret)

    async def run(self, method: str, header: dict[str, Any], body: bytes, reply: Reply) -> bytes:
        """Run one call and return its last frame."""
        try:
            if self._is_full_for(method):
                raise self._full_error()
            self._in_flight[method] += 1
            self._idle.clear()
            try:
                await self._handler(method, header, body, reply)
            finally:
                self._in_flight[method] -= 1
                if not self._in_flight[method]:
                    del self._in_flight[method]  # a peer may call any name
                if not self._in_flight:
                    self._idle.set()
            report = msgspec.msgpack.encode(reply.engine_report) if reply.engine_report else b""
            return frame(Kind.END, reply.call, report)
        except Exception as error:
            return self.failure(reply.call, method, error)

    def _is_full_for(self, method: str) -> bool:
        if self._limited_methods is None:
            return self.in_flight >= self._max_calls
        return method in self._limited_methods and self.count_calls(self._limited_methods) >= self._max_calls

    def failure(self, call: int, method: str, error: Exception) -> bytes:
        """Return the last frame of a call that has failed."""
        try:
            status, body = self._error_response(method, error)
            return frame(Kind.FAIL, call, body, status)
        except Exception:  # the caller must get a last frame, or it would wait for its timeout
            logger.exception("the call %s failed (%r), and its error response cannot be made", method, error)
            return frame(Kind.FAIL, call, b"the call has failed", 500)


_CALL = msgspec.msgpack.Decoder(tuple[str, dict[str, Any], bytes])


class ServerConnection(Peer):
    """A connection of an ingress replica; it can make calls once it has presented the secret."""

    def __init__(self, server: ChannelServer) -> None:
        super().__init__(MAX_HELLO_BYTES, silent_s=SILENT_S)
        self._server = server
        self.is_authenticated = False
        self._calls: dict[int, asyncio.Task[bytes]] = {}
        self._open_calls: dict[int, OpenCallHandler] = {}

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        if self._server.is_suspended:
            self.close("the server is suspended")
            return
        self._server.connections.add(self)
        self._loop.call_later(_HELLO_S, self._check_hello_time)

    def frame_received(self, kind: int, call: int, tokens: int, payload: bytes) -> None:
        if not self.is_authenticated:
            self._check_hello(kind, payload)
        elif kind == Kind.CALL:
            self._begin_call(call, payload)
        elif kind == Kind.CANCEL:
            if call in self._calls:
                self._calls[call].cancel()
            elif call in self._open_calls:
                self._open_calls.pop(call).on_close(tokens)
        elif kind == Kind.NOTE:
            if call in self._open_calls:
                self._pass_note(self._open_calls[call], payload, tokens)
        else:
            raise BrokenFrameError(f"a frame of the unexpected kind {kind}")

    def _begin_call(self, call: int, payload: bytes) -> None:
        if call in self._calls or call in self._open_calls:
            raise BrokenFrameError(f"call {call} is open already")
        try:
            method, header, body = _CALL.decode(payload)
        except msgspec.DecodeError as error:
            raise BrokenFrameError(f"a malformed call: {error}") from error
        reply = Reply(self, call)
        if method not in self._server.open_methods:
            task = self._calls[call] = self._loop.create_task(self._server.run(method, header, body, reply))
            task.add_done_callback(partial(self._send_last, call))
            return
        try:
            self._open_calls[call] = self._server.open_methods[method](body, reply)
        except Exception as error:
            self.send(self._server.failure(call, method, error))

    def _pass_note(self, handler: OpenCallHandler, payload: bytes, tokens: int) -> None:
        try:
            handler.on_note(payload, tokens)
        except msgspec.DecodeError as error:
            raise BrokenFrameError(f"a malformed note: {error}") from error

    def _send_last(self, call: int, task: asyncio.Task[bytes]) -> None:
        if self._calls.pop(call, None) is None:
            return  # the connection is closed
        if task.cancelled():
            self.send(frame(Kind.END, call))  # the peer has cancelled the call
        else:
            self.send(task.result())

    def ping(self) -> bytes:
        return self._server.ping() if self.is_authenticated else super().ping()

    def send(self, *parts: bytes) -> None:
        if self.unsent_bytes > _MAX_UNSENT_BYTES:
            self.close("it does not read its data")
        super().send(*parts)

    def on_closed(self, reason: str) -> None:
        self._server.connections.discard(self)
        if self._calls and not self.is_close_logged:
            logger.warning(
                "%d calls of %s are cancelled because its channel is closed: %s",
                len(self._calls),
                self.name,
                reason,
            )
        calls, self._calls = self._calls, {}
        for task in calls.values():
            task.cancel()
        open_calls, self._open_calls = self._open_calls, {}
        for handler in open_calls.values():
            handler.on_lost()

    def _check_hello(self, kind: int, payload: bytes) -> None:
        version, secret = payload[:1], payload[1:]
        if kind != Kind.HELLO:
            raise BrokenFrameError("the first frame is not a hello")
        if version != bytes([VERSION]):
            raise BrokenFrameError(
                f"its protocol version must be {VERSION}, got {version[0] if version else '?'}"
            )
        if not self._server.accepts_secret(secret):
            raise BrokenFrameError("the secret is wrong")
        self.is_authenticated = True
        self._frames.max_bytes = MAX_FRAME_BYTES
        self.send(frame(Kind.WELCOME))
        if self._server.is_leaving:
            self.send(frame(Kind.LEAVING))

    def _check_hello_time(self) -> None:
        if not self.is_authenticated:
            self.abort(TimeoutError(f"no hello within {_HELLO_S:g} s"))
