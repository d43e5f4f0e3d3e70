"""The parts of uvicorn that an ingress extends. Not all of them are public, so their names are checked."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Callable, Iterator
from types import CodeType
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from eldr_serve.ingress.options import IngressOptions

_MAX_HEAD_BYTES = 64 * 1024  # maximum size of a request's line and headers, exceeded by one read at most
_LAST_REQUEST_S = 1.0  # time for a last request, already on its way, on an idle connection while draining
_CHECKED = "0.54.0"  # version of uvicorn
# Names of uvicorn that an ingress extends, reads or sets: class, methods, attributes set by `__init__`.
_UVICORN_NAMES: tuple[tuple[type, tuple[str, ...], tuple[str, ...]], ...] = (
    (uvicorn.Server, ("capture_signals", "serve"), ("should_exit",)),
    (
        HttpToolsProtocol,
        (
            "connection_made",
            "connection_lost",
            "data_received",
            "on_headers_complete",
            "on_message_begin",
            "shutdown",
        ),
        ("connections", "cycle", "loop", "scope", "transport"),
    ),
    (
        RequestResponseCycle,
        ("send",),
        ("chunked_encoding", "expected_content_length", "keep_alive", "response_complete"),
    ),
)


def check_uvicorn() -> None:
    """Raise RuntimeError if uvicorn lacks a name that an ingress uses."""
    for owner, methods, attributes in _UVICORN_NAMES:
        missing = [name for name in methods if not hasattr(owner, name)]
        init: CodeType = vars(owner)["__init__"].__code__
        missing += [name for name in attributes if name not in init.co_names]
        if missing:
            raise RuntimeError(
                f"uvicorn {uvicorn.__version__} has no {owner.__name__}.{missing[0]}, which eldr-serve uses; "
                f"it was checked on {_CHECKED}: pip install uvicorn=={_CHECKED}"
            )


def make_server(config: uvicorn.Config) -> uvicorn.Server:
    """Return a server that leaves signals to Ray."""
    return _Server(config)


def connection_factory(options: IngressOptions, draining: asyncio.Event) -> Callable[..., asyncio.Protocol]:
    """Return the class of a server's connections with its first arguments.

    Args:
        draining: set when the server drains; a connection then ends after one more request.
    """
    return functools.partial(_Connection, options, draining)


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to Ray."""
        yield


class _Connection(HttpToolsProtocol):
    """HTTP connection with limits that uvicorn lacks: on connections, and on size and time of a head.

    On shutdown, uvicorn would close idle connections at once, and cut off clients that have just sent a
    request. Here they may send one last request, whose response says that the connection closes.
    """

    def __init__(self, options: IngressOptions, draining: asyncio.Event, **uvicorn_arguments: Any) -> None:
        super().__init__(**uvicorn_arguments)
        self._options = options
        self._draining = draining
        self._head_bytes = 0
        self._head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self._options.max_connections:
            transport.abort()
        else:
            self._start_head_timer()
        if self._draining.is_set():
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
        self._start_head_timer()

    def on_headers_complete(self) -> None:
        self._stop_head_timer()
        super().on_headers_complete()
        if self.scope["http_version"] == "1.0":
            _send_without_chunks(self.cycle)
        if self._draining.is_set():
            self.cycle.keep_alive = False

    def shutdown(self) -> None:
        """Close the connection when it is idle; uvicorn calls this when the server drains."""
        if self._idle:
            self.loop.call_later(_LAST_REQUEST_S, self._end_if_idle)
        else:
            super().shutdown()

    def _end_if_idle(self) -> None:
        if self._idle:
            self.transport.close()

    @property
    def _idle(self) -> bool:
        return self.cycle is None or bool(self.cycle.response_complete)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_head_timer()
        super().connection_lost(exc)

    def _start_head_timer(self) -> None:
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(self._options.head_timeout_s, self.transport.abort)

    def _stop_head_timer(self) -> None:
        self._head_bytes = 0
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None


def _send_without_chunks(cycle: RequestResponseCycle) -> None:
    """Close the connection after a body of unknown length, since HTTP/1.0 has no chunked encoding."""
    send = cycle.send
    sized = False

    async def send_without_chunks(message: Any) -> None:
        nonlocal sized
        if message["type"] == "http.response.start":
            sized = any(name.lower() == b"content-length" for name, _ in message.get("headers", []))
            cycle.chunked_encoding = None if sized else False
        elif not sized:
            cycle.expected_content_length = len(message.get("body", b""))
        await send(message)

    cycle.send = send_without_chunks  # type: ignore[method-assign]
