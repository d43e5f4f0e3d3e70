"""The states of a request at its client: each edge of the table, and whatever order they come in."""

from __future__ import annotations

import asyncio
from typing import Any, ClassVar
from unittest.mock import Mock

import pytest
from fake_router import FakeActor
from hypothesis import given, settings
from hypothesis import strategies as st
from tables import request, unit_table

from eldr_serve.channel import CallFailed, ChannelLost
from eldr_serve.router.client import RouterClient
from eldr_serve.router.directory import ReplicaDirectory
from eldr_serve.router.messages import Leased, Queued, Settings, Unplaced, decoder, encode
from eldr_serve.scheduling import Lease, State

EDGES = {
    State.SCORED: {State.SENT, State.LEASED, State.DONE},
    State.SENT: {State.SCORED, State.QUEUED, State.LEASED, State.DONE},
    State.QUEUED: {State.SCORED, State.LEASED, State.DONE},
    State.LEASED: {State.DONE},
    State.DONE: {State.DONE},
}


@pytest.mark.parametrize("before", State)
@pytest.mark.parametrize("after", State)
def test_a_request_goes_along_the_edges_and_no_others(before: State, after: State) -> None:
    placement = Lease(request("a"), before)
    if after in EDGES[before]:
        placement.become(after)
        assert placement.state is after
    else:
        with pytest.raises(ValueError, match=f"a cannot go from {before.value} to {after.value}"):
            placement.become(after)


class Call:
    """An open call, whose other end is the test."""

    def __init__(self, desk: Desk, body: bytes, received: Any, failed: Any) -> None:
        self.desk, self.received, self.failed = desk, received, failed
        self.told = [decoder(Any)(body)]
        self.ended = False

    def note(self, payload: bytes = b"", tokens: int = 0) -> None:
        assert not self.ended
        self.told.append(decoder(Any)(payload) if payload else tokens)

    def close(self, tokens: int = 0) -> None:
        assert not self.ended
        self.ended = True


class Desk:
    """A client with one request, to which the test speaks for the router, in these steps."""

    ANSWERS: ClassVar = {"lease": Leased("r1", policy="p"), "queue": Queued(), "unplaced": Unplaced()}
    STEPS = ("open", "fail", *ANSWERS, "swap", "lose", "away", "cancel", "release")

    def __init__(self) -> None:
        """It has been asked for a worker, and there is no channel yet."""
        directory = ReplicaDirectory()
        directory.publish({"r0": {}, "r1": {}})
        self.client = RouterClient(FakeActor(), directory)
        self.channel: Any = None
        self.calls: dict[str, Call] = {}
        self.version = 0
        self.task = asyncio.create_task(self.client.place(request("a"), None, wait_s=30.0))

    def open_call(self, method: str, body: bytes, received: Any, failed: Any) -> Call:
        call = Call(self, body, received, failed)
        if method == "place":
            assert "place" not in self.calls or self.calls["place"].ended
        self.calls[method] = call
        return call

    def lost(self, reason: str) -> None:
        calls, self.calls, self.channel = self.calls, {}, None
        for call in calls.values():
            if not call.ended:
                call.ended = True
                call.failed(ChannelLost(reason))

    def push(self) -> None:
        self.version += 1
        table = unit_table(2).to_bytes()
        self.calls["subscribe"].received(encode(Settings(self.version, "random", {}, table, self.version)))

    async def do(self, *steps: str) -> None:
        await asyncio.sleep(0)
        for step in steps:
            asked = self.calls.get("place")
            asked = None if asked is None or asked.ended else asked
            match step:
                case "open" if self.channel is None:
                    self.channel = Mock(open_call=self.open_call, close=self.lost)
                    self.client._link._subscribe(self.channel)
                    self.push()
                case "fail" if asked is not None and self.state is State.SENT:
                    asked.ended = True
                    asked.failed(CallFailed(500, b"no memory"))
                case "swap" if self.channel is not None:
                    self.push()
                case "lose" if self.channel is not None:
                    self.lost("cut")
                case "away":
                    self.client._link.give_up(TimeoutError())
                case "cancel":
                    self.task.cancel()
                case "release":
                    self.client.release("a")
                case answer if asked is not None and answer in self.ANSWERS and self.state in (
                    State.SENT, State.QUEUED
                ):  # fmt: skip
                    asked.received(encode(self.ANSWERS[answer]))
            await asyncio.sleep(0)
            await asyncio.sleep(0)

    @property
    def state(self) -> State:
        found = self.client.leases.get("a")
        return State.DONE if found is None else found.state


PATHS: dict[str, tuple[list[str], State]] = {
    "there is no channel yet": ([], State.SCORED),
    "it is sent": (["open"], State.SENT),
    "the channel is lost": (["open", "lose"], State.SCORED),
    "there is another channel": (["open", "lose", "open"], State.SENT),
    "there is a worker": (["open", "lease"], State.LEASED),
    "there is none free": (["open", "queue"], State.QUEUED),
    "the table is another": (["open", "swap"], State.SENT),
    "a worker is free now": (["open", "queue", "lease"], State.LEASED),
    "the table is swapped while it waits": (["open", "queue", "swap"], State.QUEUED),
    "the channel is lost while it waits": (["open", "queue", "lose"], State.SCORED),
    "it waits again": (["open", "queue", "lose", "open", "queue"], State.QUEUED),
    "the router knows no worker": (["open", "unplaced"], State.LEASED),
    "the router fails": (["open", "fail"], State.LEASED),
    "the router is away before it is sent": (["away"], State.LEASED),
    "the router does not answer": (["open", "away"], State.LEASED),
    "the router is away while it waits": (["open", "queue", "lose", "away"], State.LEASED),
    "it is cancelled before it is sent": (["cancel"], State.DONE),
    "it is cancelled": (["open", "cancel"], State.DONE),
    "it is cancelled while it waits": (["open", "queue", "cancel"], State.DONE),
    "it ends": (["open", "lease", "release"], State.DONE),
    "it ends while the channel is lost": (["open", "lease", "lose", "release", "open"], State.DONE),
}


@pytest.mark.parametrize("path", PATHS)
async def test_each_edge(path: str) -> None:
    steps, end = PATHS[path]
    desk = Desk()
    await desk.do(*steps)
    assert desk.state is end
    if end is State.LEASED:
        assert (await desk.task).replica in ("r0", "r1")
    asked = desk.calls.get("place")
    if end in (State.SCORED, State.DONE):
        assert asked is None or asked.ended
    elif desk.channel is not None and path != "the router fails":
        assert asked is not None
        assert not asked.ended
    desk.task.cancel()


@settings(max_examples=150)
@given(st.lists(st.sampled_from(Desk.STEPS), max_size=12))
def test_whatever_the_router_says_the_request_ends_and_nothing_stays_behind(steps: list[str]) -> None:
    async def run() -> None:
        desk = Desk()
        await desk.do(*steps, "away", "open")
        leased = (await asyncio.gather(desk.task, return_exceptions=True))[0]
        assert isinstance(leased, Lease | asyncio.CancelledError)
        assert (desk.state is State.LEASED) == ("a" in desk.client.leases)
        if desk.state is State.LEASED:  # the router knows where it is
            _, restored, lease = desk.calls["place"].told[0]
            assert restored["request_id"] == "a"
            assert lease[1] == desk.client.leases["a"].replica
        desk.client.release("a")
        assert desk.client.lease_count == 0
        assert not desk.client._calls
        assert not list(desk.client._waiting)
        assert "place" not in desk.calls or desk.calls["place"].ended

    asyncio.run(run())
