"""An ingress replica's own HTTP server, whose requests do not pass through Ray Serve's proxy."""

from __future__ import annotations

import asyncio
import re
import socket

import uvicorn
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from eldr_serve.ingress.options import IngressOptions
from eldr_serve.ingress.port import Port
from eldr_serve.ingress.uvicorn_compat import check_uvicorn, connection_factory, make_server

_BACKLOG = 4096
_REQUEST_ID = b"x-request-id"
_ECHOED_ID = re.compile(rb"[ -~]{1,256}")  # ids that are sent back: short printable ASCII


class _RequestIdEcho:
    """Sends the client's request id back, as Serve's proxy does."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request_id = next((value for name, value in scope["headers"] if name == _REQUEST_ID), b"")
        if not _ECHOED_ID.fullmatch(request_id):
            await self._app(scope, receive, send)
            return

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[_REQUEST_ID.decode()] = request_id.decode()
            await send(message)

        await self._app(scope, receive, send_with_id)


class HttpServer:
    """HTTP server on a port, whose connections the kernel spreads over the replicas that share it.

    Args:
        port: a bound port; by default, the port of `options` is bound.

    Raises:
        RuntimeError: the installed uvicorn lacks a name that the server uses.
    """

    def __init__(self, app: ASGIApp, options: IngressOptions, port: Port | None = None) -> None:
        check_uvicorn()
        self._port = port or Port(options.host, options.port or 0, "an ingress")
        # Connections inherit this: the kernel closes one whose client accepts no data for this time.
        self._port.socket.setsockopt(
            socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * options.write_timeout_s)
        )
        self._draining = asyncio.Event()
        config = uvicorn.Config(
            _RequestIdEcho(app),
            http=connection_factory(options, self._draining),  # type: ignore[arg-type]
            ws="none",
            backlog=_BACKLOG,
            lifespan="off",
            access_log=False,
            log_config=None,
            server_header=False,
            date_header=False,
            proxy_headers=False,
            timeout_keep_alive=60,
        )
        self._server = make_server(config)
        self._serving = asyncio.get_running_loop().create_task(self._server.serve([self._port.socket]))

    @property
    def port(self) -> int:
        """Return the port number."""
        return self._port.number

    async def wait(self) -> None:
        """Wait until the server has drained; raise the error that ended it earlier, if any."""
        await asyncio.shield(self._serving)
        if not self._draining.is_set():
            raise RuntimeError("the HTTP server stopped unexpectedly")

    async def drain(self) -> None:
        """Accept no further connections, and wait until the open ones have their responses."""
        self._port.release()
        self._draining.set()
        self._server.should_exit = True
        await self._serving
