"""What became of one request: kept while it runs, told once it has ended."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from eldr_serve.errors import sentence
from eldr_serve.routing import Placement


@dataclass(eq=False)
class Stage:
    """A part of a request's way; a try that failed has stages of its own.

    Attributes:
        name: prefill, place, transport (until the decode engine has the prompt's blocks and begins with its
            first step, where it tells that), first_token or stream, in this order.
        begun_s, ended_s: time.monotonic().
        worker: the engine's replica, where one worked.
        error: why it failed, one sentence; "" if it did not.
    """

    name: str
    begun_s: float
    ended_s: float = 0.0
    worker: str = ""
    error: str = ""

    @property
    def seconds(self) -> float:
        """How long it took, s."""
        return self.ended_s - self.begun_s


@dataclass(eq=False)
class RequestRecord:
    """One request's record; entered when its work begins, and left when that has ended, however it does.

    Attributes:
        path: of the URL.
        request_id: names it in answers, logs and engines.
        trace_id: of its trace; "" without tracing.
        stages: those that have ended, in the order of their ends.
        failures: what has failed it on its way, be it that it was tried again, one sentence each.
        lease: its newest.
        handover_s: from the end of prefill to the first answer of decode, s; None if there was none.
        status: of its answer; None if the client went before it had one.
        error: why the client has no whole answer, though it has waited.
        left: the client has not waited.
        tell: called when the work has ended.
    """

    path: str = ""
    tenant: str = ""
    tell: Callable[[RequestRecord], None] = lambda record: None
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
    left: bool = False

    @contextmanager
    def stage(self, name: str, worker: str = "") -> Iterator[Stage]:
        """Time this stage."""
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
                self.status = getattr(error, "status", None)  # of a refusal
            if self.status is None:
                self.status = 500
                self.failures.append(self.error)
        elif error is not None:
            self.left = True
        elif self.status is None:
            self.status = 200
        self.tell(self)

    def line(self) -> dict[str, Any]:
        """All of it as JSON types; times in s, of a stage those of all tries together."""
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
            "left": self.left,
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
        transport_s: part of the time to its first chunk; None: not known.
        first_s: time.monotonic() of the first chunk; None: it has not come.
    """

    def __init__(self, stages: list[Stage], worker: str) -> None:
        self._stages = stages
        self._worker = worker
        self.begun_s = time.monotonic()
        self.transport_s: float | None = None
        self.first_s: float | None = None

    def __enter__(self) -> None:
        """It has begun already."""

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
        said = sentence(error) if isinstance(error, Exception) else ""
        self._stages.append(Stage(name, begun_s, ended_s, self._worker, said))
