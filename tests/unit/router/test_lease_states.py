"""The states of a lease in the client: each transition, and random orders of them."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any, ClassVar
from unittest.mock import Mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eldr_serve.channel import CallFailedError, ChannelLostError
from eldr_serve.fleet.directory import ReplicaDirectory
from eldr_serve.router_client.client import RouterClient
from eldr_serve.router_protocol.messages import (
    Counted,
    Granted,
    IngressReport,
    LiveSettings,
    Place,
    Queued,
    Restore,
    Unplaced,
    Workers,
    decoder,
    encode,
)
from eldr_serve.scheduling.types import Lease, LeaseState
from tests.support.fake_router import FakeActor
from tests.support.tables import request, unit_table

TRANSITIONS = {
    LeaseState.UNSENT: {LeaseState.SENT, LeaseState.GRANTED, LeaseState.ENDED},
    LeaseState.SENT: {LeaseState.UNSENT, LeaseState.QUEUED, LeaseState.GRANTED, LeaseState.ENDED},
    LeaseState.QUEUED: {LeaseState.UNSENT, LeaseState.GRANTED, LeaseState.ENDED},
    LeaseState.GRANTED: {LeaseState.ENDED},
    LeaseState.ENDED: {LeaseState.ENDED},
}


@pytest.mark.parametrize("before", LeaseState)
@pytest.mark.parametrize("after", LeaseState)
def test_only_the_listed_transitions_are_allowed(before: LeaseState, after: LeaseState) -> None:
    lease = Lease(request("a"), before)
    if after in TRANSITIONS[before]:
        lease.become(after)
        assert lease.state is after
    else:
        with pytest.raises(ValueError, match=f"a cannot go from {before.value} to {after.value}"):
            lease.become(after)


@pytest.mark.parametrize("kind", [Restore, Workers, IngressReport, Granted, Queued, Unplaced, Place, Counted])
def test_a_message_is_tagged_with_its_name(kind: type[Any]) -> None:
    assert kind.__struct_config__.tag == kind.__name__


class Call:
    """An open call with the test at the other end."""

    def __init__(self, router: Router, body: bytes, received: Any, failed: Any) -> None:
        self.router, self.received, self.failed = router, received, failed
        self.sent = [decoder(Any)(body)]
        self.ended = False

    def note(self, payload: bytes = b"", tokens: int = 0) -> None:
        assert not self.ended
        self.sent.append(decoder(Any)(payload) if payload else tokens)

    def close(self, tokens: int = 0) -> None:
        assert not self.ended
        self.ended = True


class Router:
    """The router as a client with one request sees it, which the test controls in these steps."""

    ANSWERS: ClassVar = {"lease": Granted("r1", policy="p"), "queue": Queued(), "unplaced": Unplaced()}
    STEPS = ("open", "fail", *ANSWERS, "swap", "lose", "away", "cancel", "release")

    def __init__(self) -> None:
        """Place the request. There is no channel yet."""
        directory = ReplicaDirectory()
        directory.publish({"r0": {}, "r1": {}})
        self.client = RouterClient(FakeActor(), lambda: directory.known_workers)
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

    def lose_channel(self, reason: str) -> None:
        calls, self.calls, self.channel = self.calls, {}, None
        for call in calls.values():
            if not call.ended:
                call.ended = True
                call.failed(ChannelLostError(reason))

    def push(self) -> None:
        self.version += 1
        table = unit_table(2).to_bytes()
        self.calls["subscribe"].received(
            encode(LiveSettings(self.version, "random", {}, table, self.version))
        )

    async def do(self, *steps: str) -> None:
        await asyncio.sleep(0)
        for step in steps:
            call = self.calls.get("place")
            call = None if call is None or call.ended else call
            match step:
                case "open" if self.channel is None:
                    self.channel = Mock(open_call=self.open_call, close=self.lose_channel)
                    self.client._subscription._subscribe(self.channel)
                    self.push()
                case "fail" if call is not None and self.state is LeaseState.SENT:
                    call.ended = True
                    call.failed(CallFailedError(500, b"no memory"))
                case "swap" if self.channel is not None:
                    self.push()
                case "lose" if self.channel is not None:
                    self.lose_channel("cut")
                case "away":
                    self.client._subscription.give_up(TimeoutError())
                case "cancel":
                    self.task.cancel()
                case "release":
                    self.client.release("a")
                case answer if call is not None and answer in self.ANSWERS:  # it may come late
                    call.received(encode(self.ANSWERS[answer]))
            await asyncio.sleep(0)
            await asyncio.sleep(0)

    @property
    def state(self) -> LeaseState:
        lease = self.client.leases.get("a")
        return LeaseState.ENDED if lease is None else lease.state


PATHS: dict[str, tuple[list[str], LeaseState]] = {
    "there is no channel yet": ([], LeaseState.UNSENT),
    "it is sent": (["open"], LeaseState.SENT),
    "the channel is lost": (["open", "lose"], LeaseState.UNSENT),
    "it is sent over another channel": (["open", "lose", "open"], LeaseState.SENT),
    "it gets a worker": (["open", "lease"], LeaseState.GRANTED),
    "no worker is free": (["open", "queue"], LeaseState.QUEUED),
    "the table is swapped": (["open", "swap"], LeaseState.SENT),
    "a worker is free now": (["open", "queue", "lease"], LeaseState.GRANTED),
    "the table is swapped while it waits": (["open", "queue", "swap"], LeaseState.QUEUED),
    "the channel is lost while it waits": (["open", "queue", "lose"], LeaseState.UNSENT),
    "it waits again": (["open", "queue", "lose", "open", "queue"], LeaseState.QUEUED),
    "the router knows no worker": (["open", "unplaced"], LeaseState.GRANTED),
    "the router fails": (["open", "fail"], LeaseState.GRANTED),
    "the router is away before it is sent": (["away"], LeaseState.GRANTED),
    "the router does not answer": (["open", "away"], LeaseState.GRANTED),
    "the router is away while it waits": (["open", "queue", "lose", "away"], LeaseState.GRANTED),
    "it is cancelled before it is sent": (["cancel"], LeaseState.ENDED),
    "it is cancelled": (["open", "cancel"], LeaseState.ENDED),
    "it is cancelled while it waits": (["open", "queue", "cancel"], LeaseState.ENDED),
    "it ends": (["open", "lease", "release"], LeaseState.ENDED),
    "it ends while the channel is lost": (["open", "lease", "lose", "release", "open"], LeaseState.ENDED),
}


@pytest.mark.parametrize("path", PATHS)
async def test_each_path_ends_in_its_state(path: str) -> None:
    steps, end = PATHS[path]
    router = Router()
    await router.do(*steps)
    assert router.state is end
    if end is LeaseState.GRANTED:
        lease = await router.task
        assert lease.worker in ("r0", "r1")
        if path == "the router fails":
            assert lease.reason == "router-error"
    call = router.calls.get("place")
    if end in (LeaseState.UNSENT, LeaseState.ENDED):
        assert call is None or call.ended
    elif router.channel is not None and path != "the router fails":
        assert call is not None
        assert not call.ended
    router.task.cancel()


async def test_an_answer_after_local_fallback_is_ignored() -> None:
    """The router answers the scores of new settings, which the ingress has sent before it got Unplaced."""
    router = Router()
    await router.do("open", "swap", "unplaced")
    lease = await router.task
    assert (lease.policy, lease.reason) == ("local-fallback", "no-worker")
    granted = replace(lease)
    for answer in Router.ANSWERS:
        await router.do(answer)
        assert lease == granted
    assert not router.calls["place"].ended
    router.client.release("a")


@settings(max_examples=150)
@given(st.lists(st.sampled_from(Router.STEPS), max_size=12))
def test_any_order_of_events_ends_the_request_and_leaves_nothing_behind(steps: list[str]) -> None:
    async def run() -> None:
        router = Router()
        await router.do(*steps, "away", "open")
        leased = (await asyncio.gather(router.task, return_exceptions=True))[0]
        assert isinstance(leased, Lease | asyncio.CancelledError)
        assert (router.state is LeaseState.GRANTED) == ("a" in router.client.leases)
        if router.state is LeaseState.GRANTED:  # the router knows its worker
            _, restored, lease, _ = router.calls["place"].sent[0]
            assert restored["request_id"] == "a"
            assert lease[1] == router.client.leases["a"].worker
        router.client.release("a")
        assert not router.client.held_leases()
        assert not router.client._place_calls
        assert not list(router.client._waiting)
        assert "place" not in router.calls or router.calls["place"].ended

    asyncio.run(run())
