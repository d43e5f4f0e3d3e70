"""A queued policy that does no more than tests need; `policy=SLOTS` loads it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from eldr_serve.routing import Decision, Loads, PlacementRequest, QueuedPolicy

SLOTS = "queued_policy:Slots"


class Slots(QueuedPolicy):
    """First come, first served, on the first worker with a free slot. Remembers what it was told."""

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

    def select(self, request: PlacementRequest, loads: Loads, rng: np.random.Generator) -> Decision:
        return Decision(int(loads.workers[0]), 1, None, "at-once")

    def dispatch(
        self, waiting: Sequence[PlacementRequest], loads: Loads, rng: np.random.Generator
    ) -> list[tuple[int, Decision]]:
        self.waiting = list(waiting)
        slots = np.maximum(self.parameters.slots - loads.in_flight[loads.workers], 0)
        free = np.repeat(loads.workers, slots).tolist()
        return [(i, Decision(w, len(loads), None, "slot")) for i, w in enumerate(free[: len(waiting)])]

    def on_assigned(self, request: PlacementRequest, worker: int, decision: Decision | None = None) -> None:
        self.running[request.request_id] = worker
        self.placed_as[request.request_id] = request

    def on_progress(self, generated_tokens: Mapping[str, int]) -> None:
        self.generated |= generated_tokens

    def on_finished(self, request_id: str) -> None:
        if self.running.pop(request_id, None) is not None:
            self.lengths.append(self.generated.pop(request_id, 0))
