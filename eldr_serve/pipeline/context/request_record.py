"""The times and the outcome of a request, for its line in the log and its trace."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from eldr_serve.errors import one_line_message
from eldr_serve.pipeline.context.latency_prediction import LatencyPrediction
from eldr_serve.pipeline.context.stage import DecodeStages, Stage


@dataclass(eq=False)
class RequestRecord:
    """Times and outcome of one request.

    Attributes:
        started_at_s, ended_at_s: start and end of the work, time.monotonic().
        first_token_at_s: time of the first token, time.monotonic(); None before it.
        handover_s: time from the end of prefill to the first answer of decode, s; None if either is missing.
        stages: finished stages, in the order of their ends.
        prediction: latencies that the newest attempt's admission predicted; None if it predicted none.
        prefilled_locally: the first attempt left the prompt to its decode engine, see LocalPrefill.
        status: HTTP status of the answer; None if the client disconnected before it.
        error: why a client that waited got no complete answer.
        client_disconnected: the client disconnected before the end.
    """

    started_at_s: float = field(default_factory=time.monotonic)
    ended_at_s: float = 0.0
    first_token_at_s: float | None = None
    handover_s: float | None = None
    stages: list[Stage] = field(default_factory=list)
    prediction: LatencyPrediction | None = None
    prefilled_locally: bool = False
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
            stage.error = one_line_message(error)
            raise
        finally:
            stage.ended_at_s = time.monotonic()
            self.stages.append(stage)

    def decode_stages(self, worker: str) -> DecodeStages:
        """Time the stages of a decode call."""
        return DecodeStages(self.stages, worker)

    @property
    def num_prefills(self) -> int:
        """Return the number of prefill calls that have ended, including failed ones."""
        return sum(stage.name == "prefill" for stage in self.stages)

    @property
    def prefill_replica(self) -> str | None:
        """Return the prefill replica of the newest prefill call; None if there was no call."""
        return next((stage.worker for stage in reversed(self.stages) if stage.name == "prefill"), None)

    @property
    def seconds(self) -> dict[str, float]:
        """Return the duration of each stage, summed over all attempts, and of the whole request, s."""
        seconds: dict[str, float] = {}
        for stage in self.stages:
            seconds[stage.name] = seconds.get(stage.name, 0.0) + stage.seconds
        return seconds | {"total": self.ended_at_s - self.started_at_s}

    def end(self, error: BaseException | None) -> bool:
        """Record the end of the work; return whether it ended with an unexpected error."""
        self.ended_at_s = time.monotonic()
        if isinstance(error, Exception):
            self.error = one_line_message(error)
            if self.status is None:
                self.status = getattr(error, "status", None)  # refusals have a status
            if self.status is None:
                self.status = 500
                return True
        elif error is not None:
            # CancelledError or GeneratorExit: the HTTP server ends the work of a client that disconnects.
            self.client_disconnected = True
        elif self.status is None:
            self.status = 200
        return False
