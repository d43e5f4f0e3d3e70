"""Notifications of policies about running requests. The decisions themselves are tested with each policy."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from eldr_serve.scheduling import Decision, Loads, PlacementRequest, Policy
from eldr_serve.scheduling.placer import Placer
from eldr_serve.scheduling.shadow import Shadow
from eldr_serve.scheduling.types import Lease, LeaseState
from tests.support.tables import fail, request


class Recording(Policy):
    """A policy that takes the workers in turn, and records its notifications."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, ...]] = []
        self._next = 0

    def select(self, request: PlacementRequest, loads: Loads, rng: np.random.Generator) -> Decision:
        self._next += 1
        return Decision(int(loads.available_positions[self._next % len(loads.available_positions)]))

    def on_assigned(self, request: PlacementRequest, position: int, decision: Decision | None = None) -> None:
        self.calls.append((request.request_id, position))

    def on_finished(self, request_id: str) -> None:
        self.calls.append((request_id, "finished"))

    def new_calls(self) -> list[tuple[Any, ...]]:
        calls, self.calls = self.calls, []
        return calls


def placer_with(policy: Policy, *workers: str, requests: str = "") -> Placer:
    placer = Placer(policy, on_policy_error=fail)
    placer.set_workers(workers)
    placer.submit(Lease(request(name), LeaseState.SENT) for name in requests)
    return placer


def test_a_new_policy_or_shadow_alone_learns_of_the_running_requests() -> None:
    first, second, third = Recording(), Recording(), Recording()
    placer = placer_with(first, "w0", "w1", requests="ab")
    placer.set_workers([None, "w1"])  # "b" has lost its worker
    first.new_calls()
    shadow = Shadow(second)
    placer.set_shadow(shadow)
    shadow.catch_up()
    assert first.new_calls() == []
    assert second.new_calls() == [("a", 1)]
    placer.set_policy(third)
    shadow.catch_up()
    assert (first.new_calls(), second.new_calls()) == ([], [])
    assert third.new_calls() == [("a", 1), ("b", "finished")]


class Named(Recording):
    """A policy that records the names of the workers too."""

    def on_workers_changed(self, workers: Sequence[str | None]) -> None:
        self.calls.append(tuple(workers))


def test_a_policy_learns_of_the_workers_before_their_requests() -> None:
    first, second, third = Named(), Named(), Named()
    placer = placer_with(first, "a/0", "a/1", requests="ab")
    shadow = Shadow(second)
    placer.set_shadow(shadow)
    placer.set_policy(third)
    shadow.catch_up()
    placed = [("a", 1), ("b", 0)]
    assert [policy.new_calls() for policy in (first, second, third)] == [[("a/0", "a/1"), *placed]] * 3
