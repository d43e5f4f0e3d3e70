"""An engine core that dies or stops while its replica lives: ingresses see the engine as lost."""

import asyncio
import logging
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

from eldr_serve.channel import Channel, ChannelLostError
from eldr_serve.engine.calls import WARM_UP_ID_PREFIX, GenerationReport
from eldr_serve.engine.fake import FakeConfig, FakeEngine
from eldr_serve.engine.protocol import EngineRequest, Send
from eldr_serve.replicas import engine_watch, servers
from tests.support.channel_calls import read_all
from tests.support.engine_server import generate, running_tasks, serving
from tests.support.fake_router import wait_until

LIMIT_S = 0.1


class Core(FakeEngine):
    """An engine whose core the test can stop and kill."""

    def __init__(self, config: FakeConfig) -> None:
        super().__init__(config)
        self.runs = asyncio.Event()
        self.runs.set()
        self.dead = self.pings_fail = False
        self.pings = 0

    def kill(self) -> None:
        self.dead = True
        self.runs.set()

    async def ping(self) -> None:
        self.pings += 1
        await self._answers()
        if self.pings_fail:
            raise TimeoutError

    async def generate(self, request: EngineRequest, send: Send) -> GenerationReport:
        await self._answers()
        return await super().generate(request, send)

    async def check_health(self) -> None:
        if self.dead:
            raise RuntimeError("EngineCore exited")

    async def _answers(self) -> None:
        await self.runs.wait()
        if self.dead:
            raise RuntimeError("EngineCore exited")


@pytest.fixture
async def replica(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[Any, Channel]]:
    monkeypatch.setattr(engine_watch, "_PERIOD_S", 0.01)
    async with serving(
        servers.DecodeServer, start_engine=Core.start, stall_timeout_s=LIMIT_S, router_name="router"
    ) as server_and_channel:
        yield server_and_channel


async def reconnect(server: Any) -> Channel:
    """Connect again, as an ingress does after a loss, once the server accepts."""
    async with asyncio.timeout(5):
        while True:
            try:
                return await server._address.connect()
            except ChannelLostError:
                await asyncio.sleep(0.005)


def errors(caplog: pytest.LogCaptureFixture) -> list[str]:
    records = [record for record in caplog.records if record.name == engine_watch.__name__]
    return [record.getMessage() for record in records if record.levelno > logging.INFO]


async def test_a_core_that_does_not_answer_is_lost_until_it_answers_again(
    replica: tuple[Any, Channel], caplog: pytest.LogCaptureFixture
) -> None:
    server, channel = replica
    assert await read_all(generate(channel))
    server._engine.runs.clear()
    calls = [generate(channel) for _ in range(2)]
    loop = asyncio.get_running_loop()
    sent_s = loop.time()
    for call in calls:
        with pytest.raises(ChannelLostError):
            await call.read()
    assert loop.time() - sent_s >= LIMIT_S
    assert not channel.is_open
    await wait_until(lambda: not server._channel_server.in_flight)  # the engine has ended them
    with pytest.raises(ChannelLostError):
        await server._address.connect()
    with pytest.raises(RuntimeError, match="answered nothing"):
        await server.check_health()
    (line,) = errors(caplog)
    assert "lost the engine (its core has answered nothing for 0.1 s); 2 calls failed" in line
    server._engine.runs.set()
    channel = await reconnect(server)
    assert await read_all(generate(channel))
    await server.check_health()
    assert errors(caplog)[1:] == ["the engine answers again and takes calls"]
    channel.close("the test ends")


async def test_a_lost_core_recovers_only_after_a_successful_ping(replica: tuple[Any, Channel]) -> None:
    server, channel = replica
    assert await read_all(generate(channel))
    server._engine.runs.clear()
    with pytest.raises(ChannelLostError):
        await generate(channel).read()
    server._engine.pings_fail = True
    server._engine.runs.set()
    pings = server._engine.pings
    await wait_until(lambda: server._engine.pings > pings + 2)
    assert "answered nothing" in server._engine_watch.lost_reason
    server._engine.pings_fail = False
    (await reconnect(server)).close("the test ends")


async def test_a_stopped_core_process_is_lost_before_the_limit(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The state of its process shows it, unlike a compilation."""
    monkeypatch.setattr(engine_watch, "_PERIOD_S", 0.05)
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        served = serving(servers.DecodeServer, start_engine=Core.start, router_name="router")
        async with served as (server, channel):
            server._engine.runs.clear()
            call = generate(channel)
            await asyncio.sleep(0.3)
            assert channel.is_open  # its process runs
            process.send_signal(signal.SIGSTOP)
            with pytest.raises(ChannelLostError):
                async with asyncio.timeout(10):
                    await call.read()
            assert server._engine_watch.lost_reason == f"process {process.pid} of its core is stopped"
            process.send_signal(signal.SIGCONT)
            server._engine.runs.set()
            (await reconnect(server)).close("the test ends")
    finally:
        process.kill()
        process.wait()
    assert len(errors(caplog)) == 2  # its loss and its recovery


async def test_a_core_that_dies_is_lost_at_once_and_permanently(
    replica: tuple[Any, Channel], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The failed call shows it: the next check is an hour away."""
    server, channel = replica
    server._engine.runs.clear()
    call = generate(channel)
    await wait_until(lambda: server._channel_server.in_flight == 1)
    monkeypatch.setattr(engine_watch, "_PERIOD_S", 3600.0)
    await asyncio.sleep(0.05)  # the check that was due
    server._engine.kill()
    with pytest.raises((servers.CallFailedError, ChannelLostError)):
        await call.read()
    await wait_until(lambda: not channel.is_open)
    with pytest.raises(RuntimeError, match="exited"):
        await server.check_health()
    assert "the engine monitor" not in running_tasks()
    with pytest.raises(ChannelLostError):
        await server._address.connect()
    (line,) = errors(caplog)
    assert "it has died: EngineCore exited" in line


async def test_an_idle_core_that_dies_is_lost(replica: tuple[Any, Channel]) -> None:
    server, channel = replica
    server._engine.kill()
    await wait_until(lambda: not channel.is_open)


async def test_an_engine_may_compile_before_its_first_answer(replica: tuple[Any, Channel]) -> None:
    server, channel = replica
    assert await read_all(generate(channel, f"{WARM_UP_ID_PREFIX}1"))  # a warm-up call does not count
    server._engine.runs.clear()
    call = generate(channel)
    await asyncio.sleep(5 * LIMIT_S)
    assert channel.is_open
    server._engine.runs.set()
    assert await call.read()
    await wait_until(lambda: server._engine_watch.has_answered)


async def test_time_while_the_replica_itself_is_stopped_does_not_count(replica: tuple[Any, Channel]) -> None:
    """After a machine has slept, for example, the core's answer is there but not yet read."""
    server, channel = replica
    assert await read_all(generate(channel))
    server._engine.runs.clear()
    pings = server._engine.pings
    call = generate(channel)
    await wait_until(lambda: server._engine.pings > pings)
    time.sleep(5 * LIMIT_S)  # this blocks the event loop
    await asyncio.sleep(0.02)  # the late timer runs first
    server._engine.runs.set()
    assert await call.read()
    assert channel.is_open


async def test_an_idle_engine_is_not_pinged(replica: tuple[Any, Channel]) -> None:
    server, channel = replica
    assert await read_all(generate(channel))
    await wait_until(lambda: not server._channel_server.in_flight)
    await asyncio.sleep(0.05)
    pings = server._engine.pings
    await asyncio.sleep(0.1)
    assert server._engine.pings == pings
