"""A core that dies or stands still while its replica lives: ingresses take the engine as lost."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
from engine_server import serving
from fake_router import wait_until

from eldr_serve.channel import Channel, ChannelLost
from eldr_serve.engine.calls import WARM, decode_header
from eldr_serve.engine.fake import FakeConfig, FakeEngine
from eldr_serve.engine.protocol import EngineRequest, Send
from eldr_serve.replicas import engine_watch, servers

LIMIT_S = 0.1


class Core(FakeEngine):
    """Its core is stopped and killed as a process of its own is."""

    def __init__(self, config: FakeConfig) -> None:
        super().__init__(config)
        self.runs = asyncio.Event()
        self.runs.set()
        self.dead = False
        self.pings = 0

    def kill(self) -> None:
        self.dead = True
        self.runs.set()

    async def ping(self) -> None:
        self.pings += 1
        await self._step_of_its()

    async def generate(self, request: EngineRequest, send: Send) -> float | None:
        await self._step_of_its()
        return await super().generate(request, send)

    async def check_health(self) -> None:
        if self.dead:
            raise RuntimeError("EngineCore exited")

    async def _step_of_its(self) -> None:
        await self.runs.wait()
        if self.dead:
            raise RuntimeError("EngineCore exited")


@pytest.fixture
async def replica(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[Any, Channel]]:
    monkeypatch.setattr(engine_watch, "_PERIOD_S", 0.01)
    async with serving(
        servers.DecodeServer, engine=Core.start, stall_limit_s=LIMIT_S, router_name="router"
    ) as found:
        yield found


def generate(channel: Channel, name: str = "id", tokens: int = 1) -> Any:
    body = json.dumps({"prompt": "x", "max_tokens": tokens, "stream": True}).encode()
    return channel.call("generate", decode_header("completions", name, None), body)


async def answer(channel: Channel, name: str = "id") -> bytes:
    call, parts = generate(channel, name), []
    while (chunk := await call.read()) is not None:
        parts.append(chunk.payload)
    return b"".join(parts)


async def again(server: Any) -> Channel:
    """A new connection, as an ingress makes one after a loss; not before the server takes it."""
    async with asyncio.timeout(5):
        while True:
            try:
                return await server._address.connect()
            except ChannelLost:
                await asyncio.sleep(0.005)


def errors(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.name == engine_watch.__name__ and r.levelno > 20]


async def test_a_core_that_stands_still_is_lost_until_it_goes_on(
    replica: tuple[Any, Channel], caplog: pytest.LogCaptureFixture
) -> None:
    server, channel = replica
    assert await answer(channel)
    server._engine.runs.clear()
    calls = [generate(channel) for _ in range(2)]
    loop = asyncio.get_running_loop()
    asked_s = loop.time()
    for call in calls:
        with pytest.raises(ChannelLost):
            await call.read()
    assert loop.time() - asked_s >= LIMIT_S
    assert not channel.open
    await wait_until(lambda: not server._channel.in_flight)  # nothing of them is left in the engine
    with pytest.raises(ChannelLost):
        await server._address.connect()
    with pytest.raises(RuntimeError, match="answered nothing"):
        await server.check_health()
    (line,) = errors(caplog)
    assert "and so are 2 calls: its core has answered nothing for 0.1 s" in line
    server._engine.runs.set()
    channel = await again(server)
    assert await answer(channel)
    await server.check_health()
    assert errors(caplog)[1:] == ["the engine answers again and takes calls"]
    channel.close("the test ends")


async def test_a_core_that_is_stopped_is_lost_before_the_limit(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its process says so, from the first: a compilation does not stop one."""
    monkeypatch.setattr(engine_watch, "_PERIOD_S", 0.05)
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        async with serving(servers.DecodeServer, engine=Core.start, router_name="router") as (
            server,
            channel,
        ):
            server._engine.runs.clear()
            call = generate(channel)
            await asyncio.sleep(0.3)
            assert channel.open  # its process runs
            process.send_signal(signal.SIGSTOP)
            with pytest.raises(ChannelLost):
                async with asyncio.timeout(10):
                    await call.read()
            assert server._life.lost == f"process {process.pid} of its core is stopped"
            process.send_signal(signal.SIGCONT)
            server._engine.runs.set()
            (await again(server)).close("the test ends")
    finally:
        process.kill()
        process.wait()
    assert len(errors(caplog)) == 2  # that it is lost, and that it answers again


async def test_a_core_that_dies_is_lost_at_once_and_for_good(
    replica: tuple[Any, Channel], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The failed call says so, not the clock: the next look is an hour away."""
    server, channel = replica
    server._engine.runs.clear()
    call = generate(channel)
    await wait_until(lambda: server._channel.in_flight == 1)
    monkeypatch.setattr(engine_watch, "_PERIOD_S", 3600.0)
    await asyncio.sleep(0.05)  # the look that was due
    server._engine.kill()
    with pytest.raises((servers.CallFailed, ChannelLost)):
        await call.read()
    await wait_until(lambda: not channel.open)
    with pytest.raises(RuntimeError, match="exited"):
        await server.check_health()
    assert server._watching.done()
    with pytest.raises(ChannelLost):
        await server._address.connect()
    (line,) = errors(caplog)
    assert "it has died: EngineCore exited" in line


async def test_a_core_that_dies_idle_is_lost_too(replica: tuple[Any, Channel]) -> None:
    server, channel = replica
    server._engine.kill()
    await wait_until(lambda: not channel.open)


async def test_before_its_first_answer_to_a_client_an_engine_may_compile_for_long(
    replica: tuple[Any, Channel],
) -> None:
    server, channel = replica
    assert await answer(channel, f"{WARM}1")  # and a warm-up is no client
    server._engine.runs.clear()
    call = generate(channel)
    await asyncio.sleep(5 * LIMIT_S)
    assert channel.open
    server._engine.runs.set()
    assert await call.read()
    await wait_until(lambda: server._life.proven)


async def test_time_in_which_the_replica_itself_did_not_run_does_not_count(
    replica: tuple[Any, Channel],
) -> None:
    """As with a machine that sleeps: the core's answer lies there, and would be read next."""
    server, channel = replica
    assert await answer(channel)
    server._engine.runs.clear()
    asked = server._engine.pings
    call = generate(channel)
    await wait_until(lambda: server._engine.pings > asked)
    time.sleep(5 * LIMIT_S)  # the whole loop stands still
    await asyncio.sleep(0.02)  # the timer that is late comes first
    server._engine.runs.set()
    assert await call.read()
    assert channel.open


async def test_an_engine_without_calls_is_asked_nothing(replica: tuple[Any, Channel]) -> None:
    server, channel = replica
    assert await answer(channel)
    await wait_until(lambda: not server._channel.in_flight)
    await asyncio.sleep(0.05)
    asked = server._engine.pings
    await asyncio.sleep(0.1)
    assert server._engine.pings == asked
