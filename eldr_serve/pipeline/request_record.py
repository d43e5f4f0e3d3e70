"""Record of one request, logged when the request has ended."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from eldr_serve.errors import sentence
from eldr_serve.scheduling import Placement


@dataclass(eq=False)
class Stage:
    """One stage of a request; each attempt has its own stages.

    Attributes:
        name: prefill, place, transport (until the decode engine has the prompt's blocks and begins its first
            step, if the engine reports that), first_token or stream, in this order.
        begun_s, ended_s: time.monotonic().
        worker: the engine's replica, if any.
        error: reason of the failure, one sentence; "" without failure.
    """

    name: str
    begun_s: float
    ended_s: float = 0.0
    worker: str = ""
    error: str = ""

    @property
    def seconds(self) -> float:
        """Return the duration, s."""
        return self.ended_s - self.begun_s


@dataclass(eq=False)
class RequestRecord:
    """Record of one request, and a context manager for the work on it.

    Attributes:
        path: path of the URL.
        on_end: called when the work has ended.
        request_id: id in answers, logs and engines.
        trace_id: id of the trace; "" without tracing.
        stages: finished stages, in the order of their ends.
        failures: failures of all attempts, one sentence each.
        lease: newest lease.
        handover_s: time from the end of prefill to the first answer of decode, s; None without either.
        status: HTTP status of the answer; None if the client disconnected before it.
        error: why a client that waited got no complete answer.
        client_disconnected: the client disconnected before the end.
    """

    path: str = ""
    tenant: str = ""
    on_end: Callable[[RequestRecord], None] = lambda record: None
    trace_id: str = ""
    request_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    begun_s: float = field(default_factory=time.monotonic)
    ended_s: float = 0.0
    stages: list[Stage] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    lease: Placement | None = None
    handover_s: float | None = None
    status: int | None = None
    error: str = ""
    client_disconnected: bool = False

    @contextmanager
    def stage(self, name: str, worker: str = "") -> Iterator[Stage]:
        """Time a stage."""
        stage = Stage(name, time.monotonic(), worker=worker)
        try:
            yield stage
        except Exception as error:
            stage.error = sentence(error)
            raise
        finally:
            stage.ended_s = time.monotonic()
            self.stages.append(stage)

    def decode(self, worker: str) -> Decoding:
        """Time the stages of a decode call."""
        return Decoding(self.stages, worker)

    def __enter__(self) -> RequestRecord:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.ended_s = time.monotonic()
        if isinstance(error, Exception):
            self.error = sentence(error)
            if self.status is None:
                self.status = getattr(error, "status", None)  # refusals have a status
            if self.status is None:
                self.status = 500
                self.failures.append(self.error)
        elif error is not None:
            self.client_disconnected = True
        elif self.status is None:
            self.status = 200
        self.on_end(self)

    def line(self) -> dict[str, Any]:
        """Return the record as JSON types; times in s, each stage summed over all attempts."""
        seconds: dict[str, float] = {}
        for stage in self.stages:
            seconds[stage.name] = seconds.get(stage.name, 0.0) + stage.seconds
        seconds["total"] = self.ended_s - self.begun_s
        lease = self.lease
        return {
            "request": self.request_id,
            "trace": self.trace_id or None,
            "path": self.path,
            "tenant": self.tenant,
            "status": self.status,
            "error": self.error or None,
            "left": self.client_disconnected,
            "policy": lease.policy if lease else None,
            "reason": lease.reason if lease else None,
            "prefill": next((s.worker for s in reversed(self.stages) if s.name == "prefill"), None),
            "decode": lease.replica if lease else None,
            "prompt_tokens": lease.request.prompt_tokens if lease else None,
            "tokens": lease.generated_tokens if lease else 0,
            "seconds": {name: round(value, 6) for name, value in seconds.items()},
            "failures": self.failures,
        }


class Decoding:
    """The stages of a decode call.

    Attributes:
        transport_s: part of the time to the first chunk, s; None if unknown.
        first_s: time.monotonic() of the first chunk; None before it.
    """

    def __init__(self, stages: list[Stage], worker: str) -> None:
        self._stages = stages
        self._worker = worker
        self.begun_s = time.monotonic()
        self.transport_s: float | None = None
        self.first_s: float | None = None

    def __enter__(self) -> None:
        """Do nothing: the constructor has started the clock."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        now = time.monotonic()
        if self.first_s is None:
            self._add("first_token", self.begun_s, now, error)
            return
        begun_s = self.begun_s
        if self.transport_s is not None:
            begun_s = min(begun_s + self.transport_s, self.first_s)
            self._add("transport", self.begun_s, begun_s)
        self._add("first_token", begun_s, self.first_s)
        self._add("stream", self.first_s, now, error)

    def _add(self, name: str, begun_s: float, ended_s: float, error: BaseException | None = None) -> None:
        why = sentence(error) if isinstance(error, Exception) else ""
        self._stages.append(Stage(name, begun_s, ended_s, self._worker, why))
