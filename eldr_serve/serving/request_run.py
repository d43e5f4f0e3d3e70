"""The engines of an application, and one request on its way through them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eldr_serve.channel import Chunk
from eldr_serve.routing import Placement
from eldr_serve.serving.fleet import Fleet
from eldr_serve.serving.request_record import RequestRecord
from eldr_serve.serving.wire import Generation, created_at, is_end


@dataclass(frozen=True)
class Engines:
    """The two deployments of an application; where decode engines are whole, `prefill` has no replicas."""

    prefill: Fleet
    decode: Fleet
    max_load_ratio: float = 1.25  # a prefill replica above this times the mean load is passed over
    whole: bool = False  # decode engines prefill too


@dataclass(frozen=True)
class Prefilled:
    """A prompt whose KV blocks wait on a prefill replica, for one decode call."""

    request_id: str
    replica: str
    params: dict[str, Any]
    done_at: float  # time.monotonic()


@dataclass
class Run:
    """One request on its way, what has come of it, and what has failed it so far."""

    request: Generation
    record: RequestRecord
    placed: Callable[[Placement], None]
    cut_off: Callable[[], None]
    prefills: int = 0  # calls, whatever came of them
    failed_prefills: int = 0
    passed_over: int = 0  # prefill replicas, from the first in the prefix's rank
    failed: list[str] = field(default_factory=list)  # decode replicas
    lost: int = 0  # engines whose channel was lost while they had it
    key: int = 0  # names the request, to know it again when it comes a second time
    cuts: int = 0  # of them after the client had got some of the answer
    prompt: bytes = b""  # uint32 ids, once a prefill engine has told them
    foreseen: NDArray[np.uint32] | None = None  # the prompt's ids where no prefill engine tells them
    tokens: int = 0  # generated
    ids: bytearray = field(default_factory=bytearray)  # uint32, of those tokens whose engine told them
    sent: bool = False  # the client has got some of the answer
    ended: bool = False  # it has got all of it
    created: int | None = None  # the time in its chunks, s since 1970

    def took(self, chunk: Chunk) -> None:
        """The next part of the answer has come."""
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
    def can_go_on(self) -> bool:
        """Another engine can go on after the last token."""
        return 0 < 4 * self.tokens == len(self.ids)

    @property
    def token_ids(self) -> NDArray[np.uint32] | None:
        """uint32[n] of the prompt, as far as they are known before it is decoded."""
        return np.frombuffer(self.prompt, np.uint32) if self.prompt else self.foreseen

    def start_again(self) -> None:
        """Nothing that has come is of any use."""
        self.tokens, self.ids = 0, bytearray()
