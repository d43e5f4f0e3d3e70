"""What this process knows of one request, from its admission to its end."""

from __future__ import annotations

import hashlib
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eldr_serve.channel import Chunk
from eldr_serve.engine.calls import created_at, is_end
from eldr_serve.errors import sentence
from eldr_serve.pipeline.stage import DecodeStages, Stage
from eldr_serve.request import Request
from eldr_serve.scheduling import Lease

_BYTES_PER_ID = 4  # uint32


@dataclass(eq=False)
class RequestContext:
    """State of one request, and a context manager for the work on it.

    Attributes:
        request: what the client asked.
        path: path of the URL.
        on_end: called when the work has ended.
        on_overflow: called when the client is too slow and too much is buffered; the answer ends there.
        trace_id: id of the trace; "" without tracing.
        request_id: id in answers, logs and engines.
        lease: newest lease of a decode worker.

        stages: finished stages, in the order of their ends.
        failure_messages: failures of all attempts, one sentence each.
        handover_s: time from the end of prefill to the first answer of decode, s; None without either.
        status: HTTP status of the answer; None if the client disconnected before it.
        error: why a client that waited got no complete answer.
        client_disconnected: the client disconnected before the end.

        prefills: prefill calls, including failed ones.
        failed_prefills: failed prefill calls.
        passed_over: prefill replicas skipped, in the prefix's order of preference.
        failed_replicas: decode replicas that failed the request.
        lost_engines: engines whose channel was lost during a call.
        stream_failures: failed decode calls after the client had received part of the answer.

        prompt_ids: the prompt's token ids, uint32 bytes, from the prefill engine's answer.
        local_token_ids: uint32[n], ids tokenised here, if any.
        num_generated: number of generated tokens.
        generated_ids: ids of the generated tokens, uint32 bytes, if known.
        sent: the client has received part of the answer.
        complete: the client has received the whole answer.
        created: timestamp in the answer's chunks, s since 1970.
    """

    request: Request
    path: str = ""
    on_end: Callable[[RequestContext], None] = lambda context: None
    on_overflow: Callable[[], None] = lambda: None
    trace_id: str = ""
    request_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    lease: Lease | None = None
    # The log.
    begun_s: float = field(default_factory=time.monotonic)
    ended_s: float = 0.0
    stages: list[Stage] = field(default_factory=list)
    failure_messages: list[str] = field(default_factory=list)
    handover_s: float | None = None
    status: int | None = None
    error: str = ""
    client_disconnected: bool = False
    # Attempts.
    prefills: int = 0
    failed_prefills: int = 0
    passed_over: int = 0
    failed_replicas: list[str] = field(default_factory=list)
    lost_engines: int = 0
    stream_failures: int = 0
    # The prompt, and the answer so far.
    prompt_ids: bytes = b""
    local_token_ids: NDArray[np.uint32] | None = None
    num_generated: int = 0
    generated_ids: bytearray = field(default_factory=bytearray)
    sent: bool = False
    complete: bool = False
    created: int | None = None

    # -- prompt and answer -----------------------------------------------------------------------

    @property
    def token_ids(self) -> NDArray[np.uint32] | None:
        """Return the prompt's token ids, uint32[n], if they are known before decode."""
        return np.frombuffer(self.prompt_ids, np.uint32) if self.prompt_ids else self.local_token_ids

    @property
    def num_prompt_ids(self) -> int:
        """Return the number of token ids in the prefill engine's answer."""
        return len(self.prompt_ids) // _BYTES_PER_ID

    @property
    def num_generated_ids(self) -> int:
        """Return the number of generated tokens whose ids are known."""
        return len(self.generated_ids) // _BYTES_PER_ID

    def append_chunk(self, chunk: Chunk) -> None:
        """Append the next part of the answer."""
        self.num_generated += chunk.tokens
        self.generated_ids += chunk.ids
        if not chunk.payload:
            return
        stream = self.request.fields.stream
        if not self.sent and stream:
            self.created = created_at(chunk.payload)
        self.sent = True
        self.complete = not stream or is_end(chunk.payload)

    def discard_answer(self) -> None:
        """Discard the partial answer."""
        self.num_generated, self.generated_ids = 0, bytearray()

    @property
    def can_continue(self) -> bool:
        """Return whether another engine can continue after the last token."""
        return 0 < self.num_generated == self.num_generated_ids

    @cached_property
    def retry_key(self) -> bytes:
        """Return a digest of tenant and body, by which a tenant's retry of the request is recognised."""
        found = hashlib.blake2b(f"{self.request.tenant}\0".encode(), digest_size=16)
        found.update(self.request.body)
        return found.digest()

    @property
    def is_retry(self) -> bool:
        """Return whether the request was admitted before; a retry is not refused because others wait."""
        return bool(self.num_generated or self.failed_replicas or self.failed_prefills)

    def used_tokens(self, prompt_tokens: int) -> int:
        """Return the tokens that count towards the tenant's limit; none without a lease.

        Args:
            prompt_tokens: estimated length of the prompt, used if its tokens were not counted.
        """
        if self.lease is None:
            return 0
        return (self.lease.request.prompt_tokens or prompt_tokens) + self.lease.generated_tokens

    # -- log -------------------------------------------------------------------------------------

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

    def decode_stages(self, worker: str) -> DecodeStages:
        """Time the stages of a decode call."""
        return DecodeStages(self.stages, worker)

    def __enter__(self) -> RequestContext:
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
                self.failure_messages.append(self.error)
        elif error is not None:
            self.client_disconnected = True
        elif self.status is None:
            self.status = 200
        self.on_end(self)

    def line(self) -> dict[str, Any]:
        """Return the request's line of the log as JSON types; times in s, stages summed over all attempts."""
        seconds: dict[str, float] = {}
        for stage in self.stages:
            seconds[stage.name] = seconds.get(stage.name, 0.0) + stage.seconds
        seconds["total"] = self.ended_s - self.begun_s
        lease = self.lease
        return {
            "request": self.request_id,
            "trace": self.trace_id or None,
            "path": self.path,
            "tenant": self.request.tenant,
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
            "failures": self.failure_messages,
        }
