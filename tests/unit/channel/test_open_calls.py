"""Open calls: messages both ways, in order, until one side closes them or the connection is lost."""

from __future__ import annotations

import logging
from typing import Any

import msgspec
import pytest

from eldr_serve.channel import Channel, ChannelLostError, Reply
from tests.support.channel_calls import SECRET, Engine, until


class Handler:
    """An open call in the engine, which echoes notes and records events."""

    def __init__(self, body: bytes, reply: Reply) -> None:
        if body == b"wrong":
            raise ValueError("this is wrong")
        self.reply, self.events = reply, [body]

    def on_note(self, payload: bytes, tokens: int) -> None:
        if payload == b"nonsense":
            raise msgspec.DecodeError("cannot parse")
        if payload == b"defect":
            raise KeyError("a defect")
        if payload == b"close":
            self.reply.peer.close("it is closed")
        self.events.append((payload, tokens))
        self.reply.send(payload)

    def on_close(self, tokens: int) -> None:
        self.events.append(tokens)

    def on_lost(self) -> None:
        self.events.append("lost")


class Connection:
    """An engine with open calls, and a channel to it."""

    def __init__(self) -> None:
        self.engine = Engine()
        self.handlers: list[Handler] = []
        self.engine.server.open_methods = {"begin": self.begin}
        self.received: list[bytes] = []
        self.errors: list[Exception] = []

    async def __aenter__(self) -> Connection:
        self.channel = await Channel.connect("127.0.0.1", await self.engine.server.start("127.0.0.1"), SECRET)
        return self

    async def __aexit__(self, *error: Any) -> None:
        self.channel.close("the test ends")
        await self.engine.server.stop()

    def begin(self, body: bytes, reply: Reply) -> Handler:
        self.handlers.append(Handler(body, reply))
        return self.handlers[-1]

    def open(self, body: bytes = b"begun") -> Any:
        return self.channel.open_call("begin", body, self.received.append, self.errors.append)


async def test_notes_and_answers_arrive_in_order_and_the_close_carries_the_tokens() -> None:
    async with Connection() as connection:
        calls = [connection.open(b"%d" % number) for number in range(50)]
        for number, call in enumerate(calls):
            call.note(b"%d" % number, number)
            call.note(tokens=number + 1)
        await until(lambda: len(connection.received) == 100)
        assert connection.received[::2] == [b"%d" % number for number in range(50)]
        for call in calls:
            call.close(7)
            call.close(8)  # this has no effect
        assert connection.channel.in_flight == 0
        await until(lambda: all(len(handler.events) == 4 for handler in connection.handlers))
        for number, handler in enumerate(connection.handlers):
            assert handler.events == [b"%d" % number, (b"%d" % number, number), (b"", number + 1), 7]
        assert not connection.errors


async def test_a_refused_open_call_fails_and_the_others_continue() -> None:
    async with Connection() as connection:
        call = connection.open()
        connection.open(b"wrong")
        await until(lambda: connection.errors)
        (error,) = connection.errors
        assert (str(error), getattr(error, "status", None)) == ("this is wrong", 400)
        call.note(b"a")
        await until(lambda: connection.received == [b"a"])


async def test_a_malformed_note_loses_the_connection_at_both_ends(caplog: pytest.LogCaptureFixture) -> None:
    async with Connection() as connection:
        call, other = connection.open(), connection.open()
        with caplog.at_level(logging.WARNING):
            call.note(b"nonsense")
            await until(lambda: len(connection.errors) == 2)
        assert [type(error) for error in connection.errors] == [ChannelLostError] * 2
        assert [handler.events[-1] for handler in connection.handlers] == ["lost"] * 2
        assert "a malformed note: cannot parse" in caplog.text
        other.note(b"late")  # it has no effect
        other.close()
        with pytest.raises(ChannelLostError):
            connection.open()


@pytest.mark.parametrize("end", ["server", "caller"])
async def test_an_exception_of_a_handler_closes_the_channel_with_its_reason(
    end: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with Connection() as connection:
        if end == "server":
            connection.open().note(b"defect")
        else:
            connection.channel.open_call(
                "begin", b"", lambda payload: {}["a defect"], connection.errors.append
            )
            connection.open().note(b"a")
            await until(lambda: connection.handlers)
            connection.handlers[0].reply.send(b"an answer")
        await until(lambda: connection.errors and all(h.events[-1] == "lost" for h in connection.handlers))
        assert {type(error) for error in connection.errors} == {ChannelLostError}
        (record,) = [record for record in caplog.records if record.exc_info]
        assert "cannot be processed, so the channel is closed" in record.getMessage()
        assert record.name == "eldr_serve.channel.peer"
        if end == "caller":
            assert connection.channel.closed.result() == "a frame cannot be processed: KeyError('a defect')"


async def test_frames_after_a_closed_connection_are_ignored() -> None:
    """They are in the same segment. The call would never learn that its connection is lost."""
    async with Connection() as connection:
        first = connection.open()
        await until(lambda: connection.handlers)
        first.note(b"close")
        connection.open(b"late")
        await until(lambda: len(connection.errors) == 2)
        assert [handler.events[0] for handler in connection.handlers] == [b"begun"]
        assert connection.handlers[0].events[-2:] == ["lost", (b"close", 0)]
