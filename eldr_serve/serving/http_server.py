"""An ingress replica's own HTTP server: requests come to its event loop without crossing Ray Serve."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import re
import socket
from collections.abc import Iterator
from typing import Any

import uvicorn
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from eldr_serve.serving.admission import IngressOptions
from eldr_serve.serving.port import Port

_BACKLOG = 4096
_REQUEST_ID = b"x-request-id"
_PLAIN = re.compile(rb"[ -~]{1,256}")  # what of it is sent back: short printable ASCII
_MAX_HEAD_BYTES = 64 * 1024  # of a request's line and headers; and what one read brings beyond
_LAST_S = 1.0  # a connection's time to begin its last request when the server leaves: it may be on its way


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are Ray's."""
        yield


class _Connection(HttpToolsProtocol):
    """With what uvicorn leaves open: how many there are, and how large and slow a request's head may be.

    When the server leaves, uvicorn would close each connection without a request at once, and cut off who has
    just sent one. Here it has a last one, whose answer says that the connection ends.
    """

    def __init__(self, options: IngressOptions, leaving: asyncio.Event, **given: Any) -> None:
        super().__init__(**given)
        self._options = options
        self._leaving = leaving
        self._head_bytes = 0
        self._head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self._options.max_connections:
            transport.abort()
        else:
            self._await_head()
        if self._leaving.is_set():
            self.shutdown()

    def data_received(self, data: bytes) -> None:
        if self._head_timer is None:
            super().data_received(data)
            return
        self._head_bytes += len(data)
        super().data_received(data)
        if self._head_timer is not None and self._head_bytes > _MAX_HEAD_BYTES:
            self.transport.abort()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._await_head()

    def on_headers_complete(self) -> None:
        self._have_head()
        super().on_headers_complete()
        if self.scope["http_version"] == "1.0":
            _send_without_chunks(self.cycle)
        if self._leaving.is_set():
            self.cycle.keep_alive = False

    def shutdown(self) -> None:
        """Called by uvicorn when the server leaves."""
        if self._idle:
            self.loop.call_later(_LAST_S, self._end_if_idle)
        else:
            super().shutdown()

    def _end_if_idle(self) -> None:
        if self._idle:
            self.transport.close()

    @property
    def _idle(self) -> bool:
        return self.cycle is None or bool(self.cycle.response_complete)

    def connection_lost(self, exc: Exception | None) -> None:
        self._have_head()
        super().connection_lost(exc)

    def _await_head(self) -> None:
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(self._options.head_timeout_s, self.transport.abort)

    def _have_head(self) -> None:
        self._head_bytes = 0
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None


def _send_without_chunks(cycle: RequestResponseCycle) -> None:
    """Close the connection after a body of unknown length, since HTTP/1.0 has no chunked encoding."""
    send, sized = cycle.send, False

    async def sending(message: Any) -> None:
        nonlocal sized
        if message["type"] == "http.response.start":
            sized = any(name.lower() == b"content-length" for name, _ in message.get("headers", []))
            cycle.chunked_encoding = None if sized else False
        elif not sized:
            cycle.expected_content_length = len(message.get("body", b""))
        await send(message)

    cycle.send = sending  # type: ignore[method-assign]


class _Named:
    """Answers carry the client's own name for its request, as Serve's proxy has them carry it."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        given = next((value for name, value in scope["headers"] if name == _REQUEST_ID), b"")
        if not _PLAIN.fullmatch(given):
            await self._app(scope, receive, send)
            return

        async def named(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[_REQUEST_ID.decode()] = given.decode()
            await send(message)

        await self._app(scope, receive, named)


class HttpServer:
    """Listens on a port. The kernel spreads connections over the replicas that share it.

    Args:
        port: a bound port; by default one is bound by `options`.
    """

    def __init__(self, app: ASGIApp, options: IngressOptions, port: Port | None = None) -> None:
        self._port = port = port or Port(options.host, options.port or 0, "an ingress")
        # Connections inherit it: the kernel closes one whose client takes nothing for so long.
        port.socket.setsockopt(
            socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * options.write_timeout_s)
        )
        self._leaving = asyncio.Event()
        config = uvicorn.Config(
            _Named(app), http=functools.partial(_Connection, options, self._leaving), ws="none",  # type: ignore[arg-type]
            backlog=_BACKLOG, lifespan="off", access_log=False, log_config=None, server_header=False,
            date_header=False, proxy_headers=False, timeout_keep_alive=60,
        )  # fmt: skip
        self._server = _Server(config)
        self._serving = asyncio.get_running_loop().create_task(self._server.serve([port.socket]))

    @property
    def port(self) -> int:
        """Return the port number."""
        return self._port.number

    async def drain(self) -> None:
        """Take no further connection, and wait until those that are open have had their answers."""
        self._port.release()
        self._leaving.set()
        self._server.should_exit = True
        await self._serving
