"""An ingress replica's own HTTP server: requests come to its event loop without crossing Ray Serve."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator

import uvicorn
from starlette.types import ASGIApp

_BACKLOG = 4096


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are Ray's."""
        yield


class HttpServer:
    """Replicas of one node share the port: the kernel spreads connections over them.

    Raises:
        OSError: the port is somebody else's.
    """

    def __init__(self, app: ASGIApp, host: str, port: int) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.socket(family, socket.SOCK_STREAM)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        self._socket.bind((host, port))
        config = uvicorn.Config(
            app, backlog=_BACKLOG, lifespan="off", access_log=False, log_config=None, server_header=False,
            date_header=False, proxy_headers=False, timeout_keep_alive=60,
        )  # fmt: skip
        self._server = _Server(config)
        self._serving = asyncio.get_running_loop().create_task(self._server.serve([self._socket]))

    @property
    def port(self) -> int:
        """At which it listens."""
        port: int = self._socket.getsockname()[1]
        return port

    async def drain(self) -> None:
        """Take no further connection, and wait until those that are open have had their answers."""
        self._server.should_exit = True
        await self._serving
