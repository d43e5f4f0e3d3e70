"""The ingress's own HTTP server."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from eldr_serve.serving.http_server import HttpServer


def answering(held: asyncio.Event) -> Any:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await held.wait()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"yes"})

    return app


async def test_replicas_share_a_port_and_an_open_answer_is_awaited() -> None:
    held = asyncio.Event()
    first = HttpServer(answering(held), "127.0.0.1", 0)
    second = HttpServer(answering(held), "127.0.0.1", first.port)
    port = first.port
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
        asked = [asyncio.create_task(client.get("/")) for _ in range(8)]
        await asyncio.sleep(0.1)
        draining = asyncio.gather(first.drain(), second.drain())
        await asyncio.sleep(0.1)
        assert not draining.done()
        held.set()
        assert [(await task).text for task in asked] == ["yes"] * 8
        await client.aclose()
        await draining
        with pytest.raises(httpx.ConnectError):
            async with httpx.AsyncClient() as late:
                await late.get(f"http://127.0.0.1:{port}/")


async def test_a_port_of_somebody_else_is_an_error() -> None:
    server = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)
    with pytest.raises(OSError, match="in use"):
        HttpServer(answering(asyncio.Event()), "127.0.0.1", server.sockets[0].getsockname()[1])
    server.close()
