"""The engines of an application, and the state of one request."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eldr_serve.channel import Chunk
from eldr_serve.pipeline.request_record import RequestRecord
from eldr_serve.replicas.fleet import Fleet
from eldr_serve.request_fields import Generation, created_at, is_end
from eldr_serve.scheduling import Placement


@dataclass(frozen=True)
class Engines:
    """The two deployments of an application; `prefill` has no replicas if decode engines prefill."""

    prefill: Fleet
    decode: Fleet
    max_load_ratio: float = 1.25  # a prefill replica whose load exceeds the mean by this factor is skipped
    whole: bool = False  # decode engines prefill too


@dataclass(frozen=True)
class Prefilled:
    """A prompt whose KV blocks are held by a prefill replica for one decode call."""

    request_id: str
    replica: str
    params: dict[str, Any]
    done_at: float  # time.monotonic()


@dataclass
class Run:
    """The state of one request: its answer so far and its failures."""

    request: Generation
    record: RequestRecord
    on_lease: Callable[[Placement], None]
    on_overflow: Callable[[], None]
    prefills: int = 0  # prefill calls, including failed ones
    failed_prefills: int = 0
    passed_over: int = 0  # number of prefill replicas skipped, in the prefix's order of preference
    failed: list[str] = field(default_factory=list)  # decode replicas that failed the request
    lost_engines: int = 0  # number of engines whose channel was lost during a call
    key: int = 0  # identifies the request, to recognise a client's retry
    stream_failures: int = 0  # failed decode calls after the client had received part of the answer
    prompt: bytes = b""  # token ids, uint32 bytes, set by the prefill engine's answer
    local_token_ids: NDArray[np.uint32] | None = None  # ids tokenised here
    tokens: int = 0  # number of generated tokens
    ids: bytearray = field(default_factory=bytearray)  # ids of generated tokens, uint32, if known
    sent: bool = False  # the client has received part of the answer
    ended: bool = False  # the client has received the whole answer
    created: int | None = None  # timestamp in the answer's chunks, s since 1970

    def append_chunk(self, chunk: Chunk) -> None:
        """Append the next part of the answer."""
        self.tokens += chunk.tokens
        self.ids += chunk.ids
        if not chunk.payload:
            return
        if not self.sent and self.request.asked.stream:
            self.created = created_at(chunk.payload)
        self.sent = True
        self.ended = not self.request.asked.stream or is_end(chunk.payload)

    @property
    def request_id(self) -> str:
        return self.record.request_id

    @property
    def is_retry(self) -> bool:
        """Return whether the request was admitted before; a retry is not refused because others wait."""
        return bool(self.tokens or self.failed or self.failed_prefills)

    @property
    def can_continue(self) -> bool:
        """Return whether another engine can continue after the last token."""
        return 0 < 4 * self.tokens == len(self.ids)

    @property
    def token_ids(self) -> NDArray[np.uint32] | None:
        """Return the prompt's token ids, uint32[n], if they are known before decode."""
        return np.frombuffer(self.prompt, np.uint32) if self.prompt else self.local_token_ids

    def discard_answer(self) -> None:
        """Discard the partial answer."""
        self.tokens, self.ids = 0, bytearray()
