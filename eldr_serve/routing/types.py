"""The nouns of a placement: what arrives, what a worker holds, what was decided."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Handoff:
    """A prefilled request that needs a decode worker.

    `signature` is the prompt's expert counts, unsigned[L,E] (or the encoded unit vector). A caller
    that has scored it already gives `similarity`, float32[K], the cosine to each of the table's
    centroids, and may leave `signature` out. `prompt_key` is equal for equal prompts.
    """

    request_id: str
    signature: NDArray[Any] | None
    prompt_tokens: int
    max_new_tokens: int
    domain: str | None = None
    similarity: NDArray[np.float32] | None = None
    prompt_key: str | None = None


@dataclass(frozen=True)
class WorkerLoad:
    """What a decode worker holds now; `available` is False for one that must not be chosen."""

    in_flight: int
    kv_tokens: int
    available: bool = True


@dataclass(frozen=True, eq=False)
class Loads:
    """The same of all workers, by column: policies choose among a thousand of them in microseconds.

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
    def of(cls, workers: Loads | Sequence[WorkerLoad]) -> Loads:
        """These by column; Loads are returned as they are."""
        if isinstance(workers, Loads):
            return workers
        return cls(
            np.array([worker.in_flight for worker in workers], np.int64),
            np.array([worker.kv_tokens for worker in workers], np.int64),
            np.array([worker.available for worker in workers], bool),
        )

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
    """

    worker: int
    band: int
    similarity: float | None
    reason: str


class PolicyError(ValueError):
    """No such policy, or no such parameter or value; one sentence."""


class NoWorkerError(RuntimeError):
    """There is no available worker to choose."""
