"""Both ends of a channel over real sockets: calls, cancellation, and peers that are faulty or vanish."""

import asyncio
import logging
import random
from contextlib import suppress
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eldr_serve.channel import CallFailedError, Channel, ChannelLostError, Reply, SlowReaderError
from eldr_serve.channel import client as client_module
from eldr_serve.channel import peer as peer_module
from eldr_serve.channel.client import SILENT_S
from eldr_serve.channel.frames import HEAD, MAX_FRAME_BYTES, VERSION, BrokenFrameError, Frames, Kind, frame
from tests.faults.virtual_time import VirtualLoop
from tests.support.channel_calls import (
    HELLO,
    SECRET,
    connected_engine,
    lines,
    listening_engine,
    read_all,
    until,
)


async def test_pings_carry_the_report_to_authenticated_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_module, "PING_S", 0.02)
    numbers = iter(range(1000))
    async with connected_engine(report=lambda: {"number": next(numbers)}) as (engine, channel):
        reports: list[Any] = []
        channel.on_report = reports.append
        reader, writer = await asyncio.open_connection("127.0.0.1", engine.server.address[1])
        await until(lambda: len(reports) > 3)
        assert reports[1:] == [{"number": report["number"] + 1} for report in reports[:-1]]
        writer.close()
        assert b"number" not in await reader.read()


async def test_many_calls_share_a_connection_and_each_gets_its_own_answer() -> None:
    async with connected_engine() as (engine, channel):
        calls = [channel.call("echo", {"parts": [b"a", b"b"]}, b"%d" % n) for n in range(200)]
        answers = await asyncio.gather(*(read_all(call) for call in calls))
        assert answers == [(b"a%db%d" % (n, n), 2) for n in range(200)]
        await until(lambda: not channel.in_flight and not engine.server.in_flight)


async def test_a_refused_call_raises_the_status_and_body_of_the_engine() -> None:
    async with connected_engine(limit=1) as (engine, channel):
        with pytest.raises(CallFailedError) as refused:
            await channel.call("refuse", {}).read()
        assert (refused.value.status, refused.value.body) == (400, b"this is wrong")
        waiting = channel.call("wait", {})
        await waiting.read()
        with pytest.raises(CallFailedError, match="full"):  # more calls than the limit
            await channel.call("echo", {"parts": []}).read()
        engine.go_on.set()
        assert await read_all(waiting) == (b"done", 1)


@pytest.mark.parametrize("fails", ["the report", "the error response"])
async def test_a_call_whose_last_frame_cannot_be_made_fails(
    fails: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with connected_engine() as (engine, channel):

        async def handle(method: str, header: Any, body: bytes, reply: Reply) -> None:
            if fails == "the report":
                reply.engine_report = {"object": object()}
            else:
                raise RuntimeError("this is wrong")

        monkeypatch.setattr(engine.server, "_handler", handle)
        if fails == "the error response":
            monkeypatch.setattr(engine.server, "_error_response", Mock(side_effect=TypeError))
        call = channel.call("echo", {})
        async with asyncio.timeout(5):
            with pytest.raises(CallFailedError) as failed:
                await call.read()
            await call.wait_until_ended()
        assert failed.value.status == 500
        assert ("this is wrong" in caplog.text) == (fails == "the error response")
        assert channel.is_open
        await until(lambda: not engine.server.in_flight)


async def test_a_cancelled_call_ends_in_the_engine_first() -> None:
    async with connected_engine() as (engine, channel):
        unread = channel.call("wait", {})
        unread.cancel()  # the engine may not have begun it
        await unread.wait_until_ended()
        waiting_call = channel.call("wait", {})
        await waiting_call.read()
        waiting_call.cancel()
        waiting_call.cancel()
        await waiting_call.wait_until_ended()
        assert not engine.running
        waiting_call.cancel()
        assert await read_all(channel.call("echo", {"parts": [b"a"]})) == (b"a", 1)


async def test_a_reader_that_reads_nothing_is_disconnected_and_disturbs_no_other_call() -> None:
    async with connected_engine() as (engine, channel):
        flood = channel.call("flood", {})
        await until(lambda: engine.begun and not engine.running)
        assert await read_all(channel.call("echo", {"parts": [b"a"]})) == (b"a", 1)
        with pytest.raises(SlowReaderError):
            await flood.read()


async def test_a_slow_reader_does_not_wait_for_an_engine_that_is_stuck() -> None:
    async with connected_engine() as (engine, channel):
        engine.stops = False
        flood = channel.call("flood", {})
        flood.set_timeouts(0.05, 0.05)
        async with asyncio.timeout(5):
            await until(lambda: flood._error is not None)  # more has arrived than a stream may buffer
            with pytest.raises(SlowReaderError):
                await flood.read()
        engine.stops = True


async def test_draining_survives_a_peer_that_is_closed_meanwhile() -> None:
    async with listening_engine() as (engine, port):
        peers = [await Channel.connect("127.0.0.1", port, SECRET) for _ in range(3)]
        assert engine.server.num_peers == 3
        for connection in list(engine.server.connections)[:2]:
            connection.send = lambda data, connection=connection: connection.close("too slow")
        async with asyncio.timeout(5):
            await engine.server.drain()
        await until(lambda: not any(peer.is_open for peer in peers))


async def test_calls_end_in_the_engine_when_the_ingress_disconnects() -> None:
    async with connected_engine() as (engine, channel):
        calls = [channel.call("wait", {}) for _ in range(3)]
        await until(lambda: len(engine.running) == 3)
        channel.close("test")
        await until(lambda: not engine.running)
        for call in calls:
            with pytest.raises(ChannelLostError):
                await read_all(call)
        with pytest.raises(ChannelLostError):
            channel.call("echo", {})


async def test_all_calls_are_lost_at_once_when_the_engine_stops() -> None:
    async with connected_engine() as (engine, channel):
        call = channel.call("wait", {})
        await call.read()
        await engine.server.stop()
        with pytest.raises(ChannelLostError) as lost:
            await call.read()
        assert not lost.value.silent
        with pytest.raises(ChannelLostError):
            await call.wait_until_ended()
        assert not channel.is_open


async def test_a_draining_engine_refuses_new_calls_and_finishes_the_running_ones() -> None:
    async with connected_engine() as (engine, channel):
        call = channel.call("wait", {})
        await call.read()
        draining = asyncio.create_task(engine.server.drain())
        await until(lambda: not channel.is_open)
        assert not draining.done()
        engine.go_on.set()
        assert await read_all(call) == (b"done", 1)
        await draining


async def test_an_engine_that_leaves_says_so_on_open_and_on_later_connections() -> None:
    async with connected_engine() as (engine, channel):
        call = channel.call("wait", {})
        await call.read()
        assert not call.is_leaving
        engine.server.leave()
        await until(lambda: call.is_leaving)
        host, port = engine.server.address
        later = await Channel.connect(host, port, SECRET)
        await until(lambda: not later.is_open)
        later.close("the test ends")
        engine.go_on.set()
        assert await read_all(call) == (b"done", 1)


async def test_a_call_in_transit_to_a_draining_engine_is_answered() -> None:
    async with connected_engine() as (engine, channel):
        draining = asyncio.create_task(engine.server.drain())
        await asyncio.sleep(0)
        call = channel.call("wait", {})  # the idle engine drains, but the notice has not arrived yet
        await call.read()
        assert not channel.is_open
        assert not draining.done()
        engine.go_on.set()
        assert await read_all(call) == (b"done", 1)
        await draining


@pytest.mark.parametrize(
    "sent",
    [
        frame(Kind.HELLO, 0, bytes([VERSION]) + b"wrong"),
        frame(Kind.HELLO, 0, bytes([VERSION + 1]) + SECRET.encode()),
        frame(Kind.HELLO),
        frame(Kind.CALL, 1, b"without a hello"),
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        HEAD.pack(2**31, Kind.HELLO, 0, 0),
        HELLO + HEAD.pack(MAX_FRAME_BYTES + 1, Kind.CALL, 1, 0),
        HELLO + frame(Kind.DATA, 1, b"only engines send this"),
        HELLO + HEAD.pack(0, 77, 1, 0),
        HELLO + frame(Kind.CALL, 1, b"\xc1 is not msgpack"),
        HELLO + frame(Kind.CALL, 1, b"\x93\x01\x80\xc4\x00"),  # the method is a number
    ],
)
async def test_an_unauthenticated_peer_or_a_malformed_frame_closes_only_its_own_connection(
    sent: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    async with connected_engine() as (engine, channel):
        call = channel.call("wait", {})
        await call.read()
        with caplog.at_level(logging.WARNING):
            _, port = engine.server.address
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(sent)
            await asyncio.wait_for(reader.read(), 5)
            writer.close()
        (line,) = lines(caplog)
        assert "is closed" in line
        engine.go_on.set()
        assert await read_all(call) == (b"done", 1)


async def test_a_connection_without_a_hello_is_closed_with_one_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("eldr_serve.channel.server._HELLO_S", 0.05)
    async with listening_engine() as (_, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.wait_for(reader.read(), 5)
        writer.close()
    (line,) = lines(caplog)
    assert "no hello" in line


@pytest.mark.parametrize("silent", ["engine", "ingress"])
async def test_a_silent_peer_is_disconnected(silent: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_module, "PING_S", 0.02)
    monkeypatch.setattr("eldr_serve.channel.server.SILENT_S", 0.1)
    monkeypatch.setattr(client_module, "SILENT_S", 0.1)
    if silent == "engine":

        async def deaf(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(frame(Kind.WELCOME))
            await reader.read()

        server = await asyncio.start_server(deaf, "127.0.0.1", 0)
        channel = await Channel.connect("127.0.0.1", server.sockets[0].getsockname()[1], SECRET)
        with pytest.raises(ChannelLostError, match="silent") as lost:
            await channel.call("echo", {}).read()
        assert lost.value.silent
        server.close()
        return
    async with listening_engine() as (engine, port):
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(HELLO + frame(Kind.CALL, 1, b"\x93\xa4wait\x80\xc4\x00"))
        await until(lambda: engine.running)
        await until(lambda: not engine.running)


async def test_a_cancelled_connect_leaves_no_connection() -> None:
    accepted, closed = asyncio.Event(), asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(len(HELLO))
        accepted.set()  # it sends no welcome
        with suppress(ConnectionError):
            assert not await reader.read()
        closed.set()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    connecting = asyncio.create_task(Channel.connect("127.0.0.1", server.sockets[0].getsockname()[1], SECRET))
    await accepted.wait()
    connecting.cancel()
    async with asyncio.timeout(5):
        await closed.wait()
    server.close()


async def test_connecting_fails_with_a_wrong_secret_or_without_a_server() -> None:
    async with listening_engine() as (engine, port):
        with pytest.raises(ChannelLostError):
            await Channel.connect("127.0.0.1", port, "wrong")
        await engine.server.stop()
        with pytest.raises(ChannelLostError):
            await Channel.connect("127.0.0.1", port, SECRET)


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


async def test_an_engine_writes_all_streams_at_once_in_each_iteration_of_the_loop() -> None:
    async with connected_engine() as (engine, channel):
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
        engine.go_on.set()  # all calls send in the same iteration
        assert [await read_all(call) for call in calls] == [(b"done", 1)] * 50
        assert len(written) <= 2  # their parts, and their ends


@given(
    st.lists(st.tuples(st.sampled_from(Kind), st.integers(0, 2**32 - 1), st.binary(max_size=40))), st.data()
)
def test_frames_are_parsed_however_the_stream_is_split(sent: Any, data: st.DataObject) -> None:
    stream = b"".join(frame(kind, call, payload, 7) for kind, call, payload in sent)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=6)))
    frames, parsed = Frames(40), []
    for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        parsed += list(frames.feed(stream[start:end]))
    assert parsed == [(kind, call, 7, payload) for kind, call, payload in sent]


def test_a_frame_that_is_too_long_is_refused_by_its_header() -> None:
    with pytest.raises(BrokenFrameError):
        list(Frames(40).feed(HEAD.pack(41, Kind.DATA, 0, 0)))
