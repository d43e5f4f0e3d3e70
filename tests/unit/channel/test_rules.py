"""Peers that break the protocol cost one line in the log; when a silent peer is noticed; batched writes."""

from __future__ import annotations

import asyncio
import logging
import random
import sys
from typing import Any
from unittest.mock import Mock

import pytest
from test_channel import HELLO, SECRET, connected, listening, read_all, until

from eldr_serve.channel import Channel, ChannelLost
from eldr_serve.channel.client import SILENT_S
from eldr_serve.channel.frames import HEAD, MAX_FRAME_BYTES, Kind, frame
from tests.faults.virtual_time import VirtualLoop

CUT = frame(Kind.CALL, 1, b"x" * 100)[:-50]
_WRONG_ENGINE = """
import asyncio, sys

async def answer(reader, writer):
    await reader.readexactly(13)
    writer.write(bytes.fromhex(sys.argv[1]))
    await writer.drain()
    if sys.argv[2] == "cut":
        writer.close()
    await reader.read()

async def main():
    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name.startswith("eldr_serve")]


@pytest.mark.parametrize("sent", [CUT, HEAD.pack(2**31, Kind.CALL, 2, 0), HEAD.pack(0, 77, 1, 0)])
@pytest.mark.parametrize("calls", [0, 2])
async def test_an_engine_logs_one_line_for_a_malformed_frame(
    sent: bytes, calls: int, caplog: pytest.LogCaptureFixture
) -> None:
    async with connected() as (engine, channel):
        _, port = engine.server.address
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        waits = [frame(Kind.CALL, 10 + n, b"\x93\xa4wait\x80\xc4\x00") for n in range(calls)]
        writer.write(HELLO + b"".join(waits))
        await until(lambda: len(engine.running) == calls and len(engine.server.connections) == 2)
        writer.write(sent)
        await writer.drain()
        writer.close()
        await until(lambda: len(engine.server.connections) == 1 and not engine.running)
        (line,) = lines(caplog)
        assert "is closed" in line
        assert await read_all(channel.call("echo", {"parts": [b"a"]})) == (b"a", 1)


async def test_a_connection_without_a_hello_is_closed_with_one_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("eldr_serve.channel.server._HELLO_S", 0.05)
    async with listening() as (_, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        async with asyncio.timeout(5):
            while await reader.read(100):
                pass
        writer.close()
    (line,) = lines(caplog)
    assert "no hello" in line


@pytest.mark.parametrize(
    "sent",
    [
        frame(Kind.DATA, 1, b"x" * 10)[:-5],
        HEAD.pack(MAX_FRAME_BYTES + 1, Kind.DATA, 1, 0),
        HEAD.pack(0, 77, 1, 0),
        frame(Kind.CALL, 1, b"only ingresses send this"),
        frame(Kind.TOKENS, 1, b"abc", 2),
        frame(Kind.END, 1, b"\xc1 is not msgpack"),
    ],
)
async def test_an_ingress_closes_the_channel_to_a_faulty_engine_process_with_one_line(
    sent: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    end = "cut" if sent.startswith(frame(Kind.DATA, 1, b"x" * 10)[:4]) else "open"
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", _WRONG_ENGINE, (frame(Kind.WELCOME) + sent).hex(), end,
        stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout is not None
    try:
        port = int(await process.stdout.readline())
        async with connected() as (_, other):
            channel = await Channel.connect("127.0.0.1", port, SECRET)
            with caplog.at_level(logging.WARNING), pytest.raises(ChannelLost):
                await read_all(channel.call("echo", {}))
            (line,) = lines(caplog)
            assert "is closed" in line
            assert await read_all(other.call("echo", {"parts": [b"a"]})) == (b"a", 1)
    finally:
        process.kill()
        await process.wait()


@pytest.mark.parametrize("last_frame_s", [0.0, 0.01, 0.5, 0.99, 1.5])
def test_a_silent_engine_is_noticed_right_after_the_limit(last_frame_s: float) -> None:
    loop = VirtualLoop(random.Random(0))

    async def main() -> float:
        channel = Channel(SECRET, lambda: None)
        channel.connection_made(Mock(get_extra_info=lambda name: None))
        await asyncio.sleep(last_frame_s)
        channel.data_received(frame(Kind.PING))
        received_s = loop.time()
        await channel.closed
        channel.welcome.exception()
        return loop.time() - received_s

    assert SILENT_S <= loop.run(main()) < SILENT_S + 0.2


async def test_an_engine_writes_all_streams_at_once_in_each_turn() -> None:
    async with connected() as (engine, channel):
        (connection,) = engine.server.connections
        written: list[int] = []
        transport: Any = connection._transport
        connection._transport = Mock(
            wraps=transport,
            writelines=lambda parts: (written.append(len(parts)), transport.writelines(parts)),
        )
        calls = [channel.call("wait", {}) for _ in range(50)]
        for call in calls:
            await call.read()
        written.clear()
        engine.go_on.set()  # all calls send in the same turn
        assert [await read_all(call) for call in calls] == [(b"done", 1)] * 50
        assert len(written) <= 2  # their parts, and their ends
