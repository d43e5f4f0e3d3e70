"""Calls that stay open: messages both ways, in order, until one side ends them or the connection is lost."""

from __future__ import annotations

import logging
from typing import Any

import msgspec
import pytest
from test_channel import SECRET, Engine, until

from eldr_serve.channel import Answer, Channel, ChannelLost


class Held:
    """What the caller says is said back, and what becomes of the call is kept."""

    def __init__(self, body: bytes, answer: Answer) -> None:
        if body == b"wrong":
            raise ValueError("this is wrong")
        self.answer, self.events = answer, [body]

    def noted(self, payload: bytes, tokens: int) -> None:
        if payload == b"nonsense":
            raise msgspec.DecodeError("what is this")
        self.events.append((payload, tokens))
        self.answer.send(payload)

    def closed(self, tokens: int) -> None:
        self.events.append(tokens)

    def lost(self) -> None:
        self.events.append("lost")


class World:
    """An engine that holds calls, and a channel to it."""

    def __init__(self) -> None:
        self.engine = Engine()
        self.held: list[Held] = []
        self.engine.server.held = {"hold": self.hold}
        self.told: list[bytes] = []
        self.errors: list[Exception] = []

    async def __aenter__(self) -> World:
        self.channel = await Channel.connect("127.0.0.1", await self.engine.server.start("127.0.0.1"), SECRET)
        return self

    async def __aexit__(self, *error: Any) -> None:
        self.channel.close("the test ends")
        await self.engine.server.stop()

    def hold(self, body: bytes, answer: Answer) -> Held:
        self.held.append(Held(body, answer))
        return self.held[-1]

    def open(self, body: bytes = b"begun") -> Any:
        return self.channel.open_call("hold", body, self.told.append, self.errors.append)


async def test_notes_and_answers_come_one_by_one_and_in_order_and_the_end_brings_the_tokens() -> None:
    async with World() as world:
        calls = [world.open(b"%d" % number) for number in range(50)]
        for number, call in enumerate(calls):
            call.note(b"%d" % number, number)
            call.note(tokens=number + 1)
        await until(lambda: len(world.told) == 100)
        assert world.told[::2] == [b"%d" % number for number in range(50)]
        for call in calls:
            call.close(7)
            call.close(8)  # has no effect
        assert world.channel.in_flight == 0
        await until(lambda: all(len(held.events) == 4 for held in world.held))
        for number, held in enumerate(world.held):
            assert held.events == [b"%d" % number, (b"%d" % number, number), (b"", number + 1), 7]
        assert not world.errors


async def test_a_call_that_is_refused_fails_and_the_others_go_on() -> None:
    async with World() as world:
        call = world.open()
        world.open(b"wrong")
        await until(lambda: world.errors)
        (error,) = world.errors
        assert (str(error), getattr(error, "status", None)) == ("this is wrong", 400)
        call.note(b"a")
        await until(lambda: world.told == [b"a"])


async def test_a_lost_connection_is_told_to_both_ends_and_a_malformed_note_loses_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with World() as world:
        call, other = world.open(), world.open()
        with caplog.at_level(logging.WARNING):
            call.note(b"nonsense")
            await until(lambda: len(world.errors) == 2)
        assert [type(error) for error in world.errors] == [ChannelLost] * 2
        assert [held.events[-1] for held in world.held] == ["lost"] * 2
        assert "a malformed note: what is this" in caplog.text
        other.note(b"late")  # nobody hears it
        other.close()
        with pytest.raises(ChannelLost):
            world.open()
