"""The nouns of a placement: what arrives, what a worker holds, what was decided."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from eldr_serve.routing.prefixes import PromptBlocks

_MOST_TOKENS = 2**31 - 1


@dataclass(slots=True)  # not frozen: one is made for every placement, and that costs six times as much
class PlacementRequest:
    """A prefilled request that needs a decode worker; never changed once it is made.

    Token counts are kept within [0, 2**31 - 1], whatever a client asks for: policies add them up in int64.

    Attributes:
        signature: the prompt's expert counts, unsigned[L,E] (or the encoded unit vector); None if unknown.
            Where they are predicted, floating[L,E].
        similarity: float32[K], the cosine to each centroid of the table of `table_version`, where a caller
            has scored the signature, which it may then leave out.
        prompt_key: equal for equal prompts.
        signature_missing: there is no signature that can be used, nor a prediction.
        predicted: the signature is a prediction from the prompt's tokens.
        blocks: of the prompt, where the worker prefills it too; None where it does not.
        exclude: workers that have just failed this request.
        may_wait: in the decode queue, where the policy keeps one; else it is placed at once.
        tenant, priority: whose it is, and the weight of their fair share of workers while requests wait.
    """

    request_id: str
    signature: NDArray[Any] | None
    prompt_tokens: int
    max_new_tokens: int
    domain: str | None = None
    similarity: NDArray[np.float32] | None = None
    prompt_key: str | None = None
    table_version: int = 0
    signature_missing: bool = False
    predicted: bool = False
    blocks: PromptBlocks | None = None
    exclude: tuple[str, ...] = ()
    may_wait: bool = False
    tenant: str = ""
    priority: float = 1.0

    def __post_init__(self) -> None:
        if 0 <= self.prompt_tokens <= _MOST_TOKENS and 0 <= self.max_new_tokens <= _MOST_TOKENS:
            return
        for name in ("prompt_tokens", "max_new_tokens"):
            setattr(self, name, min(max(getattr(self, name), 0), _MOST_TOKENS))


class State(Enum):
    """How far a request is on its way to a worker."""

    SCORED = "scored"  # its client sends it with the next call
    SENT = "sent"  # the router is asked
    QUEUED = "queued"  # it waits in the decode queue
    LEASED = "leased"  # a worker is its own
    DONE = "done"  # ended, given up, or placed anew


_NEXT = {
    State.SCORED: {State.SENT, State.LEASED, State.DONE},
    State.SENT: {State.SCORED, State.QUEUED, State.LEASED, State.DONE},
    State.QUEUED: {State.SCORED, State.LEASED, State.DONE},
    State.LEASED: {State.LEASED, State.DONE},
    State.DONE: {State.DONE},
}


@dataclass(slots=True)
class Placement:
    """One request, from its first scoring to its end; the router and its client keep one each.

    Attributes:
        client: who asked.
        replica: name of the worker, once it is leased.
        slot: of that worker in the router; -1 where somebody else placed it.
        band: workers that the policy chose among.
        similarity: cosine to the worker's centroid, where known.
        best: the worker is the one most similar to the signature.
        since_s: when it came into the decode queue, by the router's clock; its client keeps here when its
            wait ends, by the clock of its loop.
        waited_s: in the decode queue.
        cached_tokens: of the prompt, which the worker is expected to have in its prefix cache.
    """

    request: PlacementRequest
    state: State = State.SCORED
    client: str = ""
    replica: str = ""
    slot: int = -1
    band: int = 0
    similarity: float | None = None
    best: bool = False
    reason: str = ""
    policy: str = ""
    since_s: float = 0.0
    waited_s: float = 0.0
    generated_tokens: int = 0
    cached_tokens: int = 0

    @property
    def request_id(self) -> str:
        return self.request.request_id

    def become(self, state: State) -> None:
        """Go on to `state`; ValueError where no request may."""
        if state not in _NEXT[self.state]:
            raise ValueError(f"request {self.request_id} cannot go from {self.state.value} to {state.value}")
        self.state = state

    def answer(self) -> Placement:
        """What its client is told: all but the arrays that the client has itself."""
        return replace(self, request=replace(self.request, signature=None, similarity=None, blocks=None))


@dataclass(frozen=True, eq=False)
class Loads:
    """What the decode workers hold now, by column: policies choose among a thousand in microseconds.

    The owner may change the arrays after the call that they were given to.

    Attributes:
        in_flight: int64[W], requests.
        kv_tokens: int64[W], prompt + generated tokens of these.
        available: bool[W]; False for a worker that must not be chosen.
        prefill_tokens: int64[W], tokens that the worker has yet to compute of these requests' prompts; None:
            none.
        cached_tokens: int64[W], tokens of the prompt to be placed that are expected in the worker's prefix
            cache; None: none.
    """

    in_flight: NDArray[np.int64]
    kv_tokens: NDArray[np.int64]
    available: NDArray[np.bool_]
    prefill_tokens: NDArray[np.int64] | None = None
    cached_tokens: NDArray[np.int64] | None = None

    @classmethod
    def of(cls, in_flight: ArrayLike, kv_tokens: ArrayLike = 0, available: ArrayLike = True) -> Loads:
        """Columns from any sequences; one value stands for all workers."""
        n = np.array(in_flight, np.int64)
        return cls(n, np.full(n.shape, kv_tokens, np.int64), np.full(n.shape, available, bool))

    def __len__(self) -> int:
        return len(self.in_flight)

    @property
    def workers(self) -> NDArray[np.int64]:
        """The available ones, ascending."""
        return np.flatnonzero(self.available)


@dataclass(slots=True)
class Decision:
    """The chosen worker (index into the loads), out of `band` workers that came into question.

    `similarity` is the cosine to the worker's centroid where one was known; `reason` says which
    rule decided, with "no-signature", "no-table" or "bad-signature" where load had to stand in.
    `learnt` is the policy's own, for its `on_assigned`.
    """

    worker: int
    band: int
    similarity: float | None
    reason: str
    learnt: Any = field(default=None, compare=False, repr=False)


class PolicyError(ValueError):
    """No such policy, or no such parameter or value; one sentence."""


class NoWorkerError(RuntimeError):
    """There is no available worker to choose."""
