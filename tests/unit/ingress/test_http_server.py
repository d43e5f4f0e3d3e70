"""The ingress's own HTTP server."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from eldr_serve.ingress.admission import IngressOptions
from eldr_serve.ingress.http_server import HttpServer
from eldr_serve.ingress.port import Port


def answering(held: asyncio.Event) -> Any:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await held.wait()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"yes"})

    return app


async def test_replicas_share_a_port_and_an_open_answer_is_awaited() -> None:
    held = asyncio.Event()
    first = HttpServer(answering(held), IngressOptions(port=0))
    second = HttpServer(answering(held), IngressOptions(port=first.port))
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


async def test_a_request_that_is_on_its_way_when_the_server_leaves_is_answered() -> None:
    """By a connection that has had none yet, and by one that is kept alive; it is their last."""
    request = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"
    held = asyncio.Event()
    held.set()
    server = HttpServer(answering(held), IngressOptions(port=0))
    fresh, kept, silent = [await _connect(server, sent) for sent in (b"", request, b"")]
    await kept[0].readuntil(b"0\r\n\r\n")
    draining = asyncio.create_task(server.drain())
    await asyncio.sleep(0.3)  # by now uvicorn has asked all connections to end
    for reader, writer in (fresh, kept):
        writer.write(request)
        answer = await reader.read()  # to the connection's end
        assert answer.startswith(b"HTTP/1.1 200 OK")
        assert b"connection: close" in answer.lower()
        writer.close()
    assert await silent[0].read() == b""
    silent[1].close()
    async with asyncio.timeout(5):
        await draining


async def test_a_port_of_another_program_is_an_error() -> None:
    server = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    with pytest.raises(OSError, match=rf"port {port}; set `ingress.port` to a free one: .* in use"):
        HttpServer(answering(asyncio.Event()), IngressOptions(port=port))
    server.close()


def test_a_port_of_another_application_is_refused_until_its_last_replica_has_gone() -> None:
    first = Port("127.0.0.1", 0, "application 'a'")
    second = Port("127.0.0.1", first.number, "application 'a'")
    for leaving in (first, second):
        with pytest.raises(OSError, match=rf"port {first.number}; .*: it is in use by application 'a'"):
            Port("127.0.0.1", first.number, "application 'b'")
        leaving.release()
    other = Port("127.0.0.1", first.number, "application 'b'")
    with pytest.raises(OSError, match="in use by application 'b'"):
        Port("127.0.0.1", first.number, "application 'a'")
    for port in (first, second, other):
        port.socket.close()
    other.release()


def test_of_two_applications_that_start_at_once_one_has_the_port(tmp_path: Path) -> None:
    """Each process tries repeatedly, and writes its name while it holds the port."""
    script = (
        "import sys, time\nfrom eldr_serve.ingress.port import Port, PortTaken\n"
        "until = time.monotonic() + 2\nheld = 0\n"
        "while time.monotonic() < until:\n"
        "    try: port = Port('127.0.0.1', int(sys.argv[1]), sys.argv[2])\n"
        "    except PortTaken: continue\n"
        "    held += 1\n"
        "    others = [line for line in open(sys.argv[3]).read().split() if line != sys.argv[2]]\n"
        "    open(sys.argv[3], 'w').write(sys.argv[2])\n"
        "    assert not others, others\n"
        "    time.sleep(0.001)\n"
        "    assert open(sys.argv[3]).read() == sys.argv[2]\n"
        "    open(sys.argv[3], 'w').close()\n"
        "    port.release(); port.socket.close()\n"
        "assert held\n"
    )
    found = Port("127.0.0.1", 0, "finds one")
    number = str(found.number)
    found.release()
    found.socket.close()
    owner = tmp_path / "owner"
    owner.touch()
    contestants = [
        subprocess.Popen([sys.executable, "-c", script, number, name, str(owner)], stderr=subprocess.PIPE)
        for name in ("a", "b", "c")
    ]
    for contestant in contestants:
        _, said = contestant.communicate(timeout=60)
        assert contestant.returncode == 0, said.decode()


async def test_a_client_of_http_1_0_gets_no_chunks_and_the_end_with_its_connection() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        headers = [(b"content-length", b"6")] if scope["path"] == "/sized" else []
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for part in (b"one", b"two"):
            await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    server = HttpServer(app, IngressOptions(port=0))
    for path in (b"/", b"/sized"):
        reader, writer = await _connect(server, b"GET %s HTTP/1.0\r\n\r\n" % path)
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
        assert body == b"onetwo"
        assert b"chunked" not in head
        writer.close()
    await server.drain()


# -- bounds --------------------------------------------------------------------------------------


async def _connect(
    server: HttpServer, sent: bytes = b""
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    while not server._server.started:
        await asyncio.sleep(0.01)
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(sent)
    return reader, writer


async def _is_closed(reader: asyncio.StreamReader) -> bool:
    with contextlib.suppress(ConnectionError):
        return await reader.read() == b""
    return True


@pytest.mark.parametrize("sent", [b"", b"GET / HT", b"GET / HTTP/1.1\r\nhost: x\r\n"])
async def test_a_head_that_does_not_end_in_time_ends_its_connection(sent: bytes) -> None:
    server = HttpServer(answering(asyncio.Event()), IngressOptions(port=0, head_timeout_s=0.2))
    reader, writer = await _connect(server, sent)
    assert await _is_closed(reader)
    writer.close()
    await server.drain()


@pytest.mark.parametrize("head", [b"GET /%s", b"GET / HTTP/1.1\r\nx: %s", b"GET / HTTP/1.1\r\n%s"])
async def test_a_head_of_any_size_ends_its_connection(head: bytes) -> None:
    server = HttpServer(answering(asyncio.Event()), IngressOptions(port=0))
    reader, writer = await _connect(server)
    with contextlib.suppress(ConnectionError):
        for _ in range(100):
            filler = b"x: y\r\n" * 10_000 if head.endswith(b"\r\n%s") else b"x" * 60_000
            writer.write(head % filler if _ == 0 else filler)
            await writer.drain()
            await asyncio.sleep(0)
    assert await _is_closed(reader)
    writer.close()
    await server.drain()


async def test_one_connection_too_many_is_closed_and_the_others_stay() -> None:
    held = asyncio.Event()
    held.set()
    server = HttpServer(answering(held), IngressOptions(port=0, max_connections=2))
    open_ = [await _connect(server) for _ in range(2)]
    await asyncio.sleep(0.1)
    reader, late = await _connect(server)
    assert await _is_closed(reader)
    for reader, writer in open_:
        for _ in range(2):  # kept alive in between
            writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
            assert await reader.readline() == b"HTTP/1.1 200 OK\r\n"
            while await reader.readline() not in (b"0\r\n", b""):
                pass
            await reader.readline()
        writer.close()
    late.close()
    await server.drain()


async def test_a_client_that_takes_nothing_loses_its_connection() -> None:
    """By the kernel, though it acknowledges probes of its full window."""

    asked = asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        asked.set()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": bytes(2**25)})

    server = HttpServer(app, IngressOptions(port=0, write_timeout_s=0.5))
    while not server._server.started:
        await asyncio.sleep(0.01)
    client = socket.create_connection(("127.0.0.1", server.port))
    client.sendall(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
    async with asyncio.timeout(30):
        await asked.wait()
        while server._server.server_state.connections:
            await asyncio.sleep(0.05)
    client.close()
    await server.drain()


# -- the client's own name for its request -------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "back"),
    [
        (b"a-name of mine/7", b"a-name of mine/7"),
        (b"x" * 256, b"x" * 256),
        (b"x" * 257, None),
        ("n\u00e4me".encode(), None),
        (b"a\tb", None),
        (b"", None),
        (None, None),
    ],
)
async def test_an_answer_carries_its_clients_name_if_that_is_short_and_plain(
    given: bytes | None, back: bytes | None
) -> None:
    held = asyncio.Event()
    held.set()
    server = HttpServer(answering(held), IngressOptions(port=0))
    named = b"" if given is None else b"X-Request-ID: " + given + b"\r\n"
    reader, writer = await _connect(server, b"GET / HTTP/1.1\r\nhost: x\r\n" + named + b"\r\n")
    head = (await reader.readuntil(b"\r\n\r\n")).split(b"\r\n")
    assert head[0] == b"HTTP/1.1 200 OK"
    found = [line.partition(b": ")[2] for line in head if line.lower().startswith(b"x-request-id:")]
    assert found == ([] if back is None else [back])
    writer.close()
    await server.drain()
