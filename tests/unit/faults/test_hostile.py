"""The hostile requests, and the classification of their answers."""

import asyncio
import base64
import json
import re
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from eldr_serve.ingress.endpoints import ENDPOINTS
from tests.fuzz.__main__ import _read, hostile, send, send_all
from tests.fuzz.cases import FuzzCase, by_hand, case, known_cases
from tests.fuzz.connections import occupy, slow_request
from tests.fuzz.generated_cases import mutations
from tests.support.in_process import command, sentence

OK = b"HTTP/1.1 200 OK\r\n\r\n{}"


@asynccontextmanager
async def server(answer: bytes | None) -> AsyncIterator[int]:
    """Serve the same answer to every client; None: send nothing and keep the connection open."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(100_000)
        if answer is None:
            await reader.read()
        else:
            writer.write(answer)
        writer.close()

    running = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with running:
        yield running.sockets[0].getsockname()[1]


@pytest.mark.parametrize(
    ("answer", "complete", "problem"),
    [
        (OK, True, None),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", True, None),
        (b"HTTP/1.1 503 Service Unavailable\r\n\r\n", True, None),
        (b"HTTP/1.1 500 Internal Server Error\r\n\r\n", True, "status 500"),
        (b"HTTP/1.1 502 Bad Gateway\r\n\r\n", False, "status 502"),
        (b"", True, "no answer"),
        (b"", False, None),
        (None, True, "the answer did not end within 0.2 s"),
        (None, False, None),
        (OK + b'\n\ndata: {"error": {"message": "x", "code": 500}}\n\n', True, "status 500 in a stream"),
        (OK + b'\n\ndata: {"error": {"message": "x", "code": 400}}\n\n', True, None),
    ],
)
async def test_answers_are_classified(answer: bytes | None, complete: bool, problem: str | None) -> None:
    async with server(answer) as port:
        outcome = await send(FuzzCase("test", b"GET / HTTP/1.1\r\n\r\n", complete), "127.0.0.1", port, 0.2)
    assert outcome.problem == problem


async def test_recorded_cases_can_be_sent_again(tmp_path: Path) -> None:
    cases = known_cases("m")
    async with server(OK) as port:
        outcomes = await send_all(cases, "127.0.0.1", port, in_flight=3, limit_s=5)
    assert len(outcomes) == len(cases)
    file = tmp_path / "violations.jsonl"
    file.write_text("".join(f"{outcome.line}\n" for outcome in outcomes))
    assert sorted(c.raw for c in _read(file)) == sorted(c.raw for c in cases)
    assert base64.b64decode(json.loads(outcomes[0].line)["raw"])


def test_cases_are_numerous_and_distinct_and_repeat_by_seed() -> None:
    cases = by_hand("m", "key")
    assert len(cases) > 5000
    assert len({c.raw for c in cases}) > 0.95 * len(cases)
    assert any(b"Bearer key" in c.raw for c in cases)
    first, again, other = (mutations("m", 30, number) for number in (1, 1, 2))
    assert first == again != other
    assert len(first) == 30
    raw = case("x", "/path", {"a": "\u00e9"}).raw
    assert raw.startswith(b"POST /path HTTP/1.1\r\nhost: eldr\r\n")
    assert raw.endswith(b'content-length: 15\r\n\r\n{"a": "\\u00e9"}')


def test_each_endpoint_has_hundreds_of_written_cases_and_its_share_of_mutations() -> None:
    path_of: dict[str, str] = {}
    for endpoint in ENDPOINTS:
        if endpoint.body is not None:
            path_of.setdefault(endpoint.body, endpoint.path)  # the others are aliases
    written, mutated = (
        Counter(path for c in cases for path in re.findall(rb"^POST (\S+)", c.raw))
        for cases in (by_hand("m", None), mutations("m", 400, 0))
    )
    assert not [path for path in path_of.values() if written[path.encode()] < 300]
    assert not [path for path in path_of.values() if mutated[path.encode()] < 5]


@pytest.mark.parametrize("url", ["nowhere", "http://127.0.0.1:1"])
def test_a_missing_service_is_reported_in_one_sentence(url: str) -> None:
    assert sentence(command(hostile, url=url)).startswith("hostile: ")


async def test_connections_are_held_open_and_then_closed() -> None:
    received: list[bytes] = []
    closed = asyncio.Semaphore(0)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        received.append(await reader.read())  # this ends when the client closes
        writer.close()
        closed.release()

    running = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = running.sockets[0].getsockname()[1]
    request = slow_request("m", 10)
    async with running, occupy("127.0.0.1", port, idle=60, slow=2, request=request):
        await asyncio.sleep(0.05)
        assert not received
    async with asyncio.timeout(10):
        for _ in range(62):
            await closed.acquire()
    assert (received.count(b""), received.count(request)) == (30, 2)
