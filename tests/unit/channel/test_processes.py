"""Channels between processes that are killed, stopped or break the protocol."""

import asyncio
import logging
import signal
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest

from eldr_serve.channel import Channel, ChannelLostError, Chunk
from eldr_serve.channel.frames import HEAD, MAX_FRAME_BYTES, Kind, frame
from tests.support.channel_calls import HELLO, SECRET, Engine, connected_engine, lines, read_all, until

_ENGINE = """
import asyncio, sys
sys.path[:0] = {path!r}
from tests.support.channel_calls import Engine

async def main():
    engine = Engine()
    print(await engine.server.start("127.0.0.1"), flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""
_INGRESS = """
import asyncio, sys
sys.path[:0] = {path!r}
from eldr_serve.channel import Channel

async def main():
    channel = await Channel.connect("127.0.0.1", {port}, {secret!r})
    calls = [channel.call("wait", {{}}) for _ in range(3)]
    print("called", flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""
_WRONG_ENGINE = """
import asyncio

async def answer(reader, writer):
    await reader.readexactly(13)
    writer.write({sent!r})
    await writer.drain()
    if {cut}:
        writer.close()
    await reader.read()

async def main():
    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


@asynccontextmanager
async def process(
    code: str, stderr: int | None = None, **values: Any
) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    """Run the code in a process, and yield it and its first line of output."""
    code = code.format(path=sys.path, **values)
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-c", code, stdout=asyncio.subprocess.PIPE, stderr=stderr
    )
    assert child.stdout is not None
    try:
        yield child, (await child.stdout.readline()).decode().strip()
    finally:
        with suppress(ProcessLookupError):
            child.kill()
        await child.wait()


@pytest.mark.parametrize(("how", "within_s"), [(signal.SIGKILL, 1.0), (signal.SIGSTOP, 3.5)])
async def test_an_engine_that_is_killed_or_stopped_loses_its_calls(how: int, within_s: float) -> None:
    async with process(_ENGINE) as (engine, port):
        channel = await Channel.connect("127.0.0.1", int(port), SECRET)
        call = channel.call("wait", {})
        assert await call.read()
        engine.send_signal(how)
        async with asyncio.timeout(10 * within_s):  # the bound holds on an idle machine
            with pytest.raises(ChannelLostError):
                await call.read()
        assert not channel.is_open


async def test_calls_end_in_the_engine_when_the_ingress_is_killed() -> None:
    engine = Engine()
    port = await engine.server.start("127.0.0.1")
    async with process(_INGRESS, port=port, secret=SECRET) as (ingress, _):
        await until(lambda: len(engine.running) == 3)
        ingress.send_signal(signal.SIGKILL)
        await until(lambda: not engine.running)
    await engine.server.stop()


async def test_a_faulty_peer_costs_an_engine_process_one_connection_and_one_log_line() -> None:
    async with process(_ENGINE, stderr=asyncio.subprocess.PIPE) as (engine, port):
        assert engine.stderr is not None
        channel = await Channel.connect("127.0.0.1", int(port), SECRET)
        waiting = channel.call("wait", {})
        assert await waiting.read()

        async def read_running() -> Chunk | None:
            return await channel.call("running", {}).read()

        cut, call = frame(Kind.CALL, 1, b"cut" * 100)[:-50], frame(Kind.CALL, 2, b"\x93\xa4wait\x80\xc4\x00")
        for first, sent in (
            (HELLO, cut),
            (HELLO + call, cut),
            (HELLO + call, HEAD.pack(0, 77, 1, 0)),
            (HELLO, HEAD.pack(MAX_FRAME_BYTES + 1, Kind.CALL, 1, 0)),
            (HELLO, HEAD.pack(0, 77, 1, 0)),
            (b"", b"GET / HTTP/1.1\r\nHost: stranger\r\n\r\n"),
            (b"", frame(Kind.HELLO, 0, HELLO[HEAD.size : HEAD.size + 1] + b"not the secret")),
        ):
            _, writer = await asyncio.open_connection("127.0.0.1", int(port))
            writer.write(first)
            while call in first and await read_running() != Chunk(b"wait wait running", 0):
                await asyncio.sleep(0.01)
            writer.write(sent)
            await writer.drain()
            writer.close()
            async with asyncio.timeout(10):
                assert b"is closed" in await engine.stderr.readline()
        assert await read_all(channel.call("echo", {"parts": [b"a"]})) == (b"a", 1)
        assert await read_running() == Chunk(b"wait running", 0)  # the faulty peers' calls have ended
        assert channel.is_open
        engine.kill()
        assert await engine.stderr.read() == b""


async def test_a_stopped_engine_that_continues_ends_its_lost_calls() -> None:
    async with process(_ENGINE) as (engine, port):
        channel = await Channel.connect("127.0.0.1", int(port), SECRET)
        call = channel.call("wait", {})
        assert await call.read()
        engine.send_signal(signal.SIGSTOP)
        started = time.monotonic()
        with pytest.raises(ChannelLostError, match="silent"):
            await call.read()
        assert time.monotonic() - started > 1  # a late ping is no loss
        engine.send_signal(signal.SIGCONT)
        channel = await Channel.connect("127.0.0.1", int(port), SECRET)
        await asyncio.sleep(0.2)
        assert await channel.call("running", {}).read() == Chunk(b"running", 0)  # the lost call has ended
        channel.close("the test ends")


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
    cut = sent.startswith(frame(Kind.DATA, 1, b"x" * 10)[:4])
    async with (
        process(_WRONG_ENGINE, sent=frame(Kind.WELCOME) + sent, cut=cut) as (_, port),
        connected_engine() as (_, other),
    ):
        channel = await Channel.connect("127.0.0.1", int(port), SECRET)
        with caplog.at_level(logging.WARNING), pytest.raises(ChannelLostError):
            await read_all(channel.call("echo", {}))
        (line,) = lines(caplog)
        assert "is closed" in line
        assert await read_all(other.call("echo", {"parts": [b"a"]})) == (b"a", 1)
