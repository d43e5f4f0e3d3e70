"""The states of a request at its client: each edge of the table, and whatever order they come in."""

from __future__ import annotations

import asyncio
from typing import ClassVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from router_talk import FakeActor
from tables import request, unit_table

from eldr_serve.router.client import RouterClient
from eldr_serve.router.directory import ReplicaDirectory
from eldr_serve.router.messages import Exchange, Settings
from eldr_serve.scheduling import Placement, State

EDGES = {
    State.SCORED: {State.SENT, State.LEASED, State.DONE},
    State.SENT: {State.SCORED, State.QUEUED, State.LEASED, State.DONE},
    State.QUEUED: {State.SCORED, State.LEASED, State.DONE},
    State.LEASED: {State.LEASED, State.DONE},
    State.DONE: {State.DONE},
}


@pytest.mark.parametrize("before", State)
@pytest.mark.parametrize("after", State)
def test_a_request_goes_along_the_edges_and_no_others(before: State, after: State) -> None:
    placement = Placement(request("a"), before)
    if after in EDGES[before]:
        placement.become(after)
        assert placement.state is after
    else:
        with pytest.raises(ValueError, match=f"a cannot go from {before.value} to {after.value}"):
            placement.become(after)


class Desk:
    """A client whose link says nothing by itself: the test speaks for the router, in these steps."""

    ANSWERS: ClassVar = {"lease": State.LEASED, "queue": State.QUEUED, "rescore": State.SENT}
    STEPS = ("send", "fail", *ANSWERS, "swap", "lose", "cancel", "release")

    def __init__(self) -> None:
        """It has been asked for a worker."""
        directory = ReplicaDirectory()
        directory.publish(["r0", "r1"])
        self.client = RouterClient(FakeActor(), directory)
        self.task = asyncio.create_task(self.client.place(request("a"), None, wait_s=30.0))
        self.message: Exchange | None = None

    async def do(self, *steps: str) -> None:
        await asyncio.sleep(0)
        for step in steps:
            match step:
                case "send":
                    self.message = self.client.message("epoch")
                case "fail" if self.message is not None:
                    self.client.undelivered(self.message)
                case "swap":
                    self.client.settings_changed(Settings(1, "random", {}, unit_table(2).to_bytes(), 1))
                case "lose":
                    self.client.link.away = True
                    self.client.lost()
                case "cancel":
                    self.task.cancel()
                case "release":
                    self.client.release("a")
                case answer if answer in self.ANSWERS:
                    told = Placement(request("a"), self.ANSWERS[answer], replica="r1", policy="p")
                    self.client.answered((told,))
            if step not in ("send", "fail", "queue", "swap", "release"):
                await asyncio.sleep(0)
            self.client.link.away = False

    @property
    def state(self) -> State:
        found = self.client.placements.get("a")
        return State.DONE if found is None else found.state


PATHS: dict[str, tuple[list[str], State]] = {
    "it is asked for": ([], State.SCORED),
    "it is sent": (["send"], State.SENT),
    "the call fails": (["send", "fail"], State.SCORED),
    "there is a worker": (["send", "lease"], State.LEASED),
    "there is none free": (["send", "queue"], State.QUEUED),
    "the table is another": (["send", "rescore"], State.SCORED),
    "a worker is free now": (["send", "queue", "lease"], State.LEASED),
    "the table is swapped while it waits": (["send", "queue", "swap"], State.SCORED),
    "it is granted while it is asked for again": (["send", "queue", "swap", "send", "lease"], State.LEASED),
    "the reply comes after the grant": (["send", "lease", "queue"], State.LEASED),
    "the router is lost before it is sent": (["lose"], State.LEASED),
    "the router is lost": (["send", "lose"], State.LEASED),
    "the router is lost while it waits": (["send", "queue", "lose"], State.LEASED),
    "it is cancelled before it is sent": (["cancel"], State.DONE),
    "it is cancelled": (["send", "cancel"], State.DONE),
    "it is cancelled while it waits": (["send", "queue", "cancel"], State.DONE),
    "it ends": (["send", "lease", "release"], State.DONE),
    "a lease comes for one that has gone": (["send", "cancel", "lease"], State.DONE),
}


@pytest.mark.parametrize("path", PATHS)
async def test_each_edge(path: str) -> None:
    steps, end = PATHS[path]
    desk = Desk()
    await desk.do(*steps)
    assert desk.state is end
    if end is State.DONE:
        assert "a" in desk.client.message("epoch").released
    if end is State.LEASED:
        assert (await desk.task).replica in ("r0", "r1")


@settings(max_examples=150)
@given(st.lists(st.sampled_from(Desk.STEPS), max_size=12))
def test_whatever_the_router_says_the_request_ends_and_nothing_stays_behind(steps: list[str]) -> None:
    async def run() -> None:
        desk = Desk()
        await desk.do(*steps, "lose", "lose")
        leased = (await asyncio.gather(desk.task, return_exceptions=True))[0]
        assert isinstance(leased, Placement | asyncio.CancelledError)
        assert (desk.state is State.LEASED) == ("a" in desk.client.placements)
        desk.client.release("a")
        assert desk.client.leases == 0
        assert not desk.client.has_queued
        told = desk.client.message("epoch")
        assert not told.placements
        assert not told.held

    asyncio.run(run())


def test_an_answer_carries_no_array() -> None:
    asked = request("a", signature=unit_table(2).centroids, similarity=unit_table(2).centroids[0])
    answer = Placement(asked, State.LEASED, replica="r0").answer()
    assert answer.request.signature is None
    assert answer.request.similarity is None
    assert answer.replica == "r0"
