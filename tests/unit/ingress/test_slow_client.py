"""A client that reads nothing of its stream, over a real HTTP server."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from typing import Any

import httpx
from fake_router import wait_until
from ingress_app import COMPLETIONS, HELLO, running_app

from eldr_serve.ingress.admission import IngressOptions
from eldr_serve.ingress.http_server import HttpServer

_KIB = b"data: " + b"x" * 1016 + b"\n\n"


async def decode(sent: Any) -> AsyncIterator[bytes]:
    """Stream without end, or answer a request for a few tokens at once."""
    if sent.fields["max_tokens"] <= 5:
        yield b'{"choices": []}'
        return
    while True:
        yield _KIB
        await asyncio.sleep(0)


async def test_a_client_that_reads_nothing_is_disconnected_and_disturbs_no_other() -> None:
    async with running_app(decode=decode) as app:
        server = HttpServer(app.http, IngressOptions(port=0))
        await wait_until(lambda: server._server.started)
        host, port = "127.0.0.1", server.port
        body = json.dumps(HELLO | {"max_tokens": 99, "stream": True}).encode()
        silent = socket.create_connection((host, port))
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        silent.sendall(head.encode() + body)
        await wait_until(lambda: app.decode.requests and app.decode.requests[-1].cancelled)
        async with httpx.AsyncClient(base_url=f"http://{host}:{port}") as client:
            assert (await client.post(COMPLETIONS, json=HELLO)).status_code == 200
        silent.close()
        await wait_until(lambda: app.ingress.gate.in_flight == 0)
        await server.drain()
