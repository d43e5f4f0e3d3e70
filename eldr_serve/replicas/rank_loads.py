"""Load of one data-parallel rank of an engine, in its replica, for the replica's report."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from eldr_serve.queues.reports import PromptMeter


class RankLoad:
    """The open calls to one rank, and the prompts that it computes.

    Args:
        clock: monotonic clock that returns seconds.

    Attributes:
        calls: number of open calls that need a slot of the rank.
        meter: measures the prompts, if the rank computes them.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self.calls = 0
        self.meter = PromptMeter(clock=clock)

    @contextmanager
    def track_call(self) -> Iterator[None]:
        """Count a call until the context ends."""
        self.calls += 1
        try:
            yield
        finally:
            self.calls -= 1
