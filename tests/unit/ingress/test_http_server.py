"""The ingress's own HTTP server."""

import asyncio
import contextlib
import errno
import fcntl
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import httpx
import pytest
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from eldr_serve.ingress.http_server import HttpServer
from eldr_serve.ingress.options import IngressOptions
from eldr_serve.ingress.port import Port, PortTakenError


def answer_yes(go: asyncio.Event | None = None) -> Any:
    """Return an application that answers after the event, or at once."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if go is not None:
            await go.wait()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"yes"})

    return app


@asynccontextmanager
async def serving(app: Any, **options: Any) -> AsyncIterator[HttpServer]:
    server = HttpServer(app, IngressOptions(port=0, **options))
    while not server._server.started:
        await asyncio.sleep(0.01)
    yield server
    await server.drain()


async def connect(server: HttpServer, sent: bytes = b"") -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(sent)
    return reader, writer


async def is_closed(reader: asyncio.StreamReader) -> bool:
    with contextlib.suppress(ConnectionError):
        return await reader.read() == b""
    return True


async def test_a_uvicorn_without_a_name_that_the_server_uses_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with monkeypatch.context() as patches:
        patches.delattr(HttpToolsProtocol, "on_headers_complete")
        with pytest.raises(RuntimeError, match=r"has no HttpToolsProtocol.on_headers_complete, which"):
            HttpServer(answer_yes(), IngressOptions(port=0))
    monkeypatch.setattr(RequestResponseCycle, "__init__", lambda self: None)
    with pytest.raises(RuntimeError, match=r"no RequestResponseCycle.chunked_encoding.* pip install"):
        HttpServer(answer_yes(), IngressOptions(port=0))


async def test_replicas_share_a_port_and_drain_waits_for_open_answers() -> None:
    go = asyncio.Event()
    first = HttpServer(answer_yes(go), IngressOptions(port=0))
    second = HttpServer(answer_yes(go), IngressOptions(port=first.port))
    port = first.port
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
        requests = [asyncio.create_task(client.get("/")) for _ in range(8)]
        await asyncio.sleep(0.1)
        draining = asyncio.gather(first.drain(), second.drain())
        await asyncio.sleep(0.1)
        assert not draining.done()
        go.set()
        assert [(await task).text for task in requests] == ["yes"] * 8
        await client.aclose()
        await draining
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"http://127.0.0.1:{port}/")


async def test_a_request_in_transit_to_a_draining_server_is_answered() -> None:
    """The connection is new or kept alive, and closes after the answer."""
    request = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"
    async with serving(answer_yes()) as server:
        new, kept_alive, silent = [await connect(server, sent) for sent in (b"", request, b"")]
        await kept_alive[0].readuntil(b"0\r\n\r\n")
        draining = asyncio.create_task(server.drain())
        await asyncio.sleep(0.3)  # uvicorn asks all connections to end
        for reader, writer in (new, kept_alive):
            writer.write(request)
            answer = await reader.read()  # this ends when the connection closes
            assert answer.startswith(b"HTTP/1.1 200 OK")
            assert b"connection: close" in answer.lower()
            writer.close()
        assert await silent[0].read() == b""
        silent[1].close()
        async with asyncio.timeout(5):
            await draining


async def test_a_port_used_by_another_program_is_an_error() -> None:
    server = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    with pytest.raises(OSError, match=rf"port {port}; set `ingress.port` to a free one: .* in use"):
        HttpServer(answer_yes(), IngressOptions(port=port))
    server.close()


def test_a_lock_file_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eldr_serve.ingress.port.tempfile.gettempdir", lambda: str(tmp_path / "none"))
    with pytest.raises(PortTakenError, match=r"cannot lock port \d+ with the file .*none.*: No such file"):
        Port("127.0.0.1", 0, "application 'a'")


def test_a_lock_file_that_cannot_be_read_is_left_unlocked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("eldr_serve.ingress.port.tempfile.gettempdir", lambda: str(tmp_path))
    with monkeypatch.context() as patches:
        broken = Mock(side_effect=OSError(errno.EIO, "Input/output error"))
        patches.setattr("eldr_serve.ingress.port.os.pread", broken)
        with pytest.raises(PortTakenError, match="Input/output error"):
            Port("127.0.0.1", 0, "application 'a'")
    (lock,) = tmp_path.iterdir()
    with lock.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # BlockingIOError if a descriptor were still open


def test_a_port_belongs_to_one_application_until_its_last_replica_releases_it() -> None:
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


def test_one_of_several_applications_that_start_together_gets_the_port(tmp_path: Path) -> None:
    """Each process takes the port repeatedly, and writes its name while it holds the port."""
    script = """
import sys, time
from eldr_serve.ingress.port import Port, PortTakenError
until = time.monotonic() + 2
held = 0
while time.monotonic() < until:
    try: port = Port('127.0.0.1', int(sys.argv[1]), sys.argv[2])
    except PortTakenError: continue
    held += 1
    others = [line for line in open(sys.argv[3]).read().split() if line != sys.argv[2]]
    open(sys.argv[3], 'w').write(sys.argv[2])
    assert not others, others
    time.sleep(0.001)
    assert open(sys.argv[3]).read() == sys.argv[2]
    open(sys.argv[3], 'w').close()
    port.release(); port.socket.close()
assert held
"""
    probe = Port("127.0.0.1", 0, "probe")
    number = str(probe.number)
    probe.release()
    probe.socket.close()
    owner = tmp_path / "owner"
    owner.touch()
    processes = [
        subprocess.Popen([sys.executable, "-c", script, number, name, str(owner)], stderr=subprocess.PIPE)
        for name in ("a", "b", "c")
    ]
    for process in processes:
        _, stderr = process.communicate(timeout=60)
        assert process.returncode == 0, stderr.decode()


async def test_an_http_1_0_client_gets_an_unchunked_answer_that_ends_with_the_connection() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        headers = [(b"content-length", b"6")] if scope["path"] == "/sized" else []
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for part in (b"one", b"two"):
            await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    async with serving(app) as server:
        for path in (b"/", b"/sized"):
            reader, writer = await connect(server, b"GET %s HTTP/1.0\r\n\r\n" % path)
            head, _, body = (await reader.read()).partition(b"\r\n\r\n")
            assert body == b"onetwo"
            assert b"chunked" not in head
            writer.close()


@pytest.mark.parametrize("sent", [b"", b"GET / HT", b"GET / HTTP/1.1\r\nhost: x\r\n"])
async def test_a_head_that_arrives_too_slowly_closes_the_connection(sent: bytes) -> None:
    async with serving(answer_yes(), head_timeout_s=0.2) as server:
        reader, writer = await connect(server, sent)
        assert await is_closed(reader)
        writer.close()


@pytest.mark.parametrize("head", [b"GET /%s", b"GET / HTTP/1.1\r\nx: %s", b"GET / HTTP/1.1\r\n%s"])
async def test_an_oversized_head_closes_the_connection(head: bytes) -> None:
    filler = b"x: y\r\n" * 10_000 if head.endswith(b"\r\n%s") else b"x" * 60_000
    async with serving(answer_yes(asyncio.Event())) as server:
        reader, writer = await connect(server, head % filler)
        with contextlib.suppress(ConnectionError):
            for _ in range(99):
                await writer.drain()
                await asyncio.sleep(0)
                writer.write(filler)
            await writer.drain()
        assert await is_closed(reader)
        writer.close()


async def test_a_connection_above_the_limit_is_closed_and_the_others_stay_open() -> None:
    async with serving(answer_yes(), max_connections=2) as server:
        connections = [await connect(server) for _ in range(2)]
        await asyncio.sleep(0.1)
        reader, late = await connect(server)
        assert await is_closed(reader)
        for reader, writer in connections:
            for _ in range(2):  # the connection is kept alive in between
                writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
                assert (await reader.readuntil(b"0\r\n\r\n")).startswith(b"HTTP/1.1 200 OK\r\n")
            writer.close()
        late.close()


async def test_a_client_that_reads_nothing_loses_its_connection() -> None:
    """The kernel closes it, although the client acknowledges probes of its full window."""
    received = asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        received.set()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": bytes(2**25)})

    async with serving(app, write_timeout_s=0.5) as server:
        with socket.create_connection(("127.0.0.1", server.port)) as client:
            client.sendall(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
            async with asyncio.timeout(30):
                await received.wait()
                while server._server.server_state.connections:
                    await asyncio.sleep(0.05)


@pytest.mark.parametrize(
    ("request_id", "returned"),
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
async def test_an_answer_returns_the_request_id_if_it_is_short_and_printable(
    request_id: bytes | None, returned: bytes | None
) -> None:
    header = b"" if request_id is None else b"X-Request-ID: " + request_id + b"\r\n"
    async with serving(answer_yes()) as server:
        reader, writer = await connect(server, b"GET / HTTP/1.1\r\nhost: x\r\n" + header + b"\r\n")
        head = (await reader.readuntil(b"\r\n\r\n")).split(b"\r\n")
        assert head[0] == b"HTTP/1.1 200 OK"
        values = [line.partition(b": ")[2] for line in head if line.lower().startswith(b"x-request-id:")]
        assert values == ([] if returned is None else [returned])
        writer.close()
