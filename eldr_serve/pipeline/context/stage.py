"""Stages of a request: their times and failures."""

from __future__ import annotations

import time
from dataclasses import dataclass
from types import TracebackType

from eldr_serve.errors import one_line_message


@dataclass(eq=False)
class Stage:
    """One stage of a request; each attempt has its own stages.

    Attributes:
        name: prefill, place, transport (until the decode engine has the prompt's blocks and begins its first
            step, if the engine reports that), first_token or stream, in this order.
        started_at_s, ended_at_s: time.monotonic().
        worker: the worker that was called, if any.
        error: reason of the failure, one sentence; "" if the stage did not fail.
    """

    name: str
    started_at_s: float
    ended_at_s: float = 0.0
    worker: str = ""
    error: str = ""

    @property
    def seconds(self) -> float:
        """Return the duration, s."""
        return self.ended_at_s - self.started_at_s


class DecodeStages:
    """The stages of a decode call.

    Attributes:
        transport_s: the engine's transport time, part of the time to the first chunk, s; None if unknown.
        first_chunk_at_s: time.monotonic() of the first chunk; None before it.
    """

    def __init__(self, stages: list[Stage], worker: str) -> None:
        self._stages = stages
        self._worker = worker
        self.started_at_s = time.monotonic()
        self.transport_s: float | None = None
        self.first_chunk_at_s: float | None = None

    def __enter__(self) -> DecodeStages:
        """Return the stages, whose clock the constructor has started."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        now_s = time.monotonic()
        if self.first_chunk_at_s is None:
            self._add("first_token", self.started_at_s, now_s, error)
            return
        started_at_s = self.started_at_s
        if self.transport_s is not None:
            started_at_s = min(started_at_s + self.transport_s, self.first_chunk_at_s)
            self._add("transport", self.started_at_s, started_at_s)
        self._add("first_token", started_at_s, self.first_chunk_at_s)
        self._add("stream", self.first_chunk_at_s, now_s, error)

    def _add(self, name: str, from_s: float, until_s: float, error: BaseException | None = None) -> None:
        why = one_line_message(error) if isinstance(error, Exception) else ""
        self._stages.append(Stage(name, from_s, until_s, self._worker, why))
