"""A queued policy that does no more than tests need."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from eldr_serve.routing import Decision, Loads, PlacementRequest, QueuedPolicy
from eldr_serve.routing.registry import POLICIES


class Slots(QueuedPolicy):
    """First come, first served, on the first worker with a free slot. Remembers what it was told."""

    name = "slots"

    class Parameters(QueuedPolicy.Parameters):
        slots: int = 1
        queue: bool = True

    parameters: Parameters

    def __init__(self, **parameters: Any) -> None:
        super().__init__(**parameters)
        self.waiting: list[PlacementRequest] = []  # at the last dispatch
        self.running: dict[str, int] = {}  # request id -> worker
        self.placed_as: dict[str, PlacementRequest] = {}  # the same requests
        self.generated: dict[str, int] = {}
        self.lengths: list[int] = []  # of requests that have ended

    @property
    def queues(self) -> bool:
        return self.parameters.queue

    def select(self, handoff: PlacementRequest, loads: Loads, rng: np.random.Generator) -> Decision:
        return Decision(int(loads.workers[0]), 1, None, "at-once")

    def dispatch(
        self, waiting: Sequence[PlacementRequest], loads: Loads, rng: np.random.Generator
    ) -> list[tuple[int, Decision]]:
        self.waiting = list(waiting)
        slots = np.maximum(self.parameters.slots - loads.in_flight[loads.workers], 0)
        free = np.repeat(loads.workers, slots).tolist()
        return [(i, Decision(w, len(loads), None, "slot")) for i, w in enumerate(free[: len(waiting)])]

    def on_assigned(self, handoff: PlacementRequest, worker: int, decision: Decision | None = None) -> None:
        self.running[handoff.request_id] = worker
        self.placed_as[handoff.request_id] = handoff

    def on_progress(self, generated_tokens: Mapping[str, int]) -> None:
        self.generated |= generated_tokens

    def on_finished(self, request_id: str) -> None:
        if self.running.pop(request_id, None) is not None:
            self.lengths.append(self.generated.pop(request_id, 0))


@contextmanager
def registered() -> Iterator[None]:
    """`slots` is a policy's name within the block."""
    POLICIES["slots"] = Slots
    try:
        yield
    finally:
        del POLICIES["slots"]
