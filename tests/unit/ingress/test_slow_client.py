"""A client that reads nothing of its stream, at a real HTTP server."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from typing import Any

import httpx
from ingress_app import running_app
from router_talk import settled

from eldr_serve.ingress.admission import IngressOptions
from eldr_serve.ingress.http_server import HttpServer

_KIB = b"data: " + b"x" * 1016 + b"\n\n"


async def endless(sent: Any) -> AsyncIterator[bytes]:
    while True:
        yield _KIB
        await asyncio.sleep(0)


async def briefly(sent: Any) -> AsyncIterator[bytes]:
    async for chunk in endless(sent) if sent.fields["max_tokens"] > 5 else once():
        yield chunk


async def once() -> AsyncIterator[bytes]:
    yield b'{"choices": []}'


async def test_a_client_that_reads_nothing_is_cut_off_and_disturbs_nobody() -> None:
    async with running_app(decode=briefly) as app:
        server = HttpServer(app.http, IngressOptions(port=0))
        await settled(lambda: server._server.started)
        host, port = "127.0.0.1", server.port
        body = json.dumps({"model": "m", "prompt": "x", "max_tokens": 99, "stream": True}).encode()
        deaf = socket.create_connection((host, port))
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        deaf.sendall(head.encode() + body)
        await settled(lambda: app.decode.requests and app.decode.requests[-1].cancelled)
        async with httpx.AsyncClient(base_url=f"http://{host}:{port}") as client:
            brief = {"model": "m", "prompt": "x", "max_tokens": 2}
            assert (await client.post("/v1/completions", json=brief)).status_code == 200
        deaf.close()
        await settled(lambda: app.ingress.gate.in_flight == 0)
        await server.drain()
