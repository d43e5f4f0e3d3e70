"""The nouns of a placement: what arrives, what a worker holds, what was decided."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

_MOST_TOKENS = 2**31 - 1


@dataclass(frozen=True)
class PlacementRequest:
    """A prefilled request that needs a decode worker.

    Token counts are kept within [0, 2**31 - 1], whatever a client asks for: policies add them up in int64.

    Attributes:
        signature: the prompt's expert counts, unsigned[L,E] (or the encoded unit vector); None if unknown.
        similarity: float32[K], the cosine to each centroid of the table of `table_version`, where a caller
            has scored the signature, which it may then leave out.
        prompt_key: equal for equal prompts.
        signature_missing: prefill gave no signature that can be used.
        exclude: workers that have just failed this request.
        may_wait: in the decode queue, where the policy keeps one; else it is placed at once.
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
    exclude: tuple[str, ...] = ()
    may_wait: bool = False

    def __post_init__(self) -> None:
        for name in ("prompt_tokens", "max_new_tokens"):
            if not 0 <= getattr(self, name) <= _MOST_TOKENS:
                object.__setattr__(self, name, min(max(getattr(self, name), 0), _MOST_TOKENS))


@dataclass(frozen=True, eq=False)
class Loads:
    """What the decode workers hold now, by column: policies choose among a thousand in microseconds.

    The owner may change the arrays after the call that they were given to.

    Attributes:
        in_flight: int64[W], requests.
        kv_tokens: int64[W], prompt + generated tokens of these.
        available: bool[W]; False for a worker that must not be chosen.
    """

    in_flight: NDArray[np.int64]
    kv_tokens: NDArray[np.int64]
    available: NDArray[np.bool_]

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


@dataclass(frozen=True)
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
