"""An engine behind a channel, whose methods are named after what they do, and calls to it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from eldr_serve.channel import Call, Channel, ChannelServer, Reply
from eldr_serve.channel.frames import VERSION, Kind, frame

SECRET = "secret"
HELLO = frame(Kind.HELLO, 0, bytes([VERSION]) + SECRET.encode())


class Engine:
    """An engine whose methods are named after what they do. It records which calls run."""

    def __init__(self, limit: int = 1000, report: Any = dict) -> None:
        self.running: list[str] = []
        self.begun = 0
        self.stops = True
        self.go_on = asyncio.Event()
        self.server = ChannelServer(
            SECRET,
            self.handle_call,
            error_response=lambda _, e: (400 if isinstance(e, ValueError) else 500, str(e).encode()),
            max_calls=limit,
            full_error=lambda: RuntimeError("full"),
            report=report,
        )

    async def handle_call(self, method: str, header: dict[str, Any], body: bytes, reply: Reply) -> None:
        self.running.append(method)
        self.begun += 1
        try:
            if method == "echo":
                for part in header["parts"]:
                    reply.send(part + body, 1)
                    await asyncio.sleep(0)
            elif method == "running":
                reply.send(" ".join(self.running).encode())
            elif method == "refuse":
                raise ValueError("this is wrong")
            elif method == "flood":
                while True:
                    reply.send(b"x" * 65536, 1)
                    try:
                        await asyncio.sleep(0)
                    except asyncio.CancelledError:
                        if self.stops:
                            raise
                        await asyncio.sleep(1)  # a stuck engine stops late
                        raise
            elif method == "wait":
                reply.send(b"begun")
                await self.go_on.wait()
                reply.send(b"done", 1)
        finally:
            self.running.remove(method)


@asynccontextmanager
async def listening_engine(**options: Any) -> AsyncIterator[tuple[Engine, int]]:
    """Run an engine behind a channel, and yield it and its port."""
    engine = Engine(**options)
    port = await engine.server.start("127.0.0.1")
    try:
        yield engine, port
    finally:
        await engine.server.stop()


@asynccontextmanager
async def connected_engine(**options: Any) -> AsyncIterator[tuple[Engine, Channel]]:
    """Run an engine behind a channel, and yield it and a client of the channel."""
    async with listening_engine(**options) as (engine, port):
        channel = await Channel.connect("127.0.0.1", port, SECRET)
        try:
            yield engine, channel
        finally:
            channel.close("the test ends")


async def until(condition: Any) -> None:
    """Poll until the condition holds. Raise TimeoutError if it does not within 5 s."""
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0.005)


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return the messages that the service has logged."""
    return [record.getMessage() for record in caplog.records if record.name.startswith("eldr_serve")]


async def read_all(call: Call) -> tuple[bytes, int]:
    """Return the complete answer to a call and its number of tokens."""
    payload, tokens = b"", 0
    while (chunk := await call.read()) is not None:
        payload, tokens = payload + chunk.payload, tokens + chunk.num_tokens
    return payload, tokens
