"""The nouns of a placement: what arrives, what a worker holds, what was decided."""

from __future__ import annotations

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
