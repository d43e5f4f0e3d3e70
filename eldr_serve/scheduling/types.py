"""Data types of placement: requests, leases, loads and decisions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field
from enum import Enum
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from eldr_serve.errors import UserInputError
from eldr_serve.scheduling.prefixes import PromptBlocks

_MAX_TOKENS = 2**31 - 1


@dataclass(slots=True)  # a frozen one would take six times as long to create
class PlacementRequest:
    """A prefilled request that needs a decode worker. It is never changed; `replace` makes another one.

    `prompt_tokens` and `max_new_tokens` are clipped to [0, 2**31 - 1], since policies add them up in int64.

    Attributes:
        expert_counts: the prompt's counts, unsigned[L,E], or floating[L,E] if predicted; None if unknown.
        resumed_tokens: number of an answer's tokens that the counts include, because it is resumed.
        domain: kind of request, as the client named it in x-eldr-domain; None if it named none.
        similarity: float32[K], the cosine to each centroid of the table of `table_version`; None unless the
            caller has scored the counts, which it may then omit.
        labels: values of the `x-eldr-label-NAME` headers, by name, for policies outside this project.
        adapter: LoRA adapter of the request; "" for the base model.
        prompt_key: key that is equal for equal prompts; None if unknown.
        counts_missing: whether there are neither usable counts nor a prediction.
        predicted: whether the counts are a prediction from the prompt's tokens.
        blocks: the blocks of the prompt if the worker also prefills; else None.
        exclude: workers to avoid, because they failed this request, left while they answered it, were ejected
            by its ingress, or would compute its prompt or its answer too late.
        may_wait: whether the request may wait in the policy's decode queue; otherwise it is placed at once.
        tenant: name of the tenant.
        priority: weight of the tenant's fair share of workers while requests wait.
        worker_failed: whether a worker has just failed this request.
        first_token_due_in_s: time until its objective requires the first token, s; None without an objective.
    """

    request_id: str
    prompt_tokens: int
    max_new_tokens: int
    _: KW_ONLY
    expert_counts: NDArray[Any] | None = None
    resumed_tokens: int = 0
    domain: str | None = None
    labels: Mapping[str, str] = field(default_factory=dict)
    adapter: str = ""
    similarity: NDArray[np.float32] | None = None
    prompt_key: str | None = None
    table_version: int = 0
    counts_missing: bool = False
    predicted: bool = False
    blocks: PromptBlocks | None = None
    exclude: tuple[str, ...] = ()
    may_wait: bool = False
    tenant: str = ""
    priority: float = 1.0
    worker_failed: bool = False
    first_token_due_in_s: float | None = None

    def __post_init__(self) -> None:
        if 0 <= self.prompt_tokens <= _MAX_TOKENS and 0 <= self.max_new_tokens <= _MAX_TOKENS:
            return
        for name in ("prompt_tokens", "max_new_tokens"):
            setattr(self, name, min(max(getattr(self, name), 0), _MAX_TOKENS))

    @property
    def counted_tokens(self) -> int:
        """Return the number of tokens whose experts `expert_counts` counts."""
        return self.prompt_tokens + self.resumed_tokens


class LeaseState(Enum):
    """The states of a lease. UNSENT and SENT: the lease is requested but not answered."""

    UNSENT = "unsent"  # the ingress sends the request when it has a channel
    SENT = "sent"  # the router has not answered yet
    QUEUED = "queued"  # the request waits in the decode queue
    GRANTED = "granted"  # the request holds the lease: it may decode on the worker
    ENDED = "ended"  # the request ended, was cancelled, or was placed again


_NEXT = {
    LeaseState.UNSENT: {LeaseState.SENT, LeaseState.GRANTED, LeaseState.ENDED},
    LeaseState.SENT: {LeaseState.UNSENT, LeaseState.QUEUED, LeaseState.GRANTED, LeaseState.ENDED},
    LeaseState.QUEUED: {LeaseState.UNSENT, LeaseState.GRANTED, LeaseState.ENDED},
    LeaseState.GRANTED: {LeaseState.ENDED},
    LeaseState.ENDED: {LeaseState.ENDED},
}


@dataclass(slots=True)
class Lease:
    """A request's lease of a decode worker: requested, perhaps queued, granted, ended.

    The router and its ingress each have a copy. The ingress uses its copy for the call to the decode engine.
    The router fills three more fields, which it does not send: `ingress`, `queued_at_s` and
    `first_token_deadline_s`.

    Attributes:
        ingress: id of the ingress that sent the request.
        worker: name of the granted worker; "" while there is none.
        position: the worker's position in the router; -1 if the router did not place the request.
        num_candidates: number of candidate workers.
        similarity: cosine to the worker's centroid, if known.
        is_most_similar: whether no available worker is more similar to the signature.
        reason: rule that chose the worker, as in Decision; if the ingress chose it, why the router did not;
            "" while there is none.
        policy: name of the policy that chose the worker; "" while there is none.
        queued_at_s: time of entry into the decode queue, by the router's clock.
        first_token_deadline_s: time at which the objective requires the first token, by the router's clock;
            None if the request has no objective.
        waited_s: wait in the decode queue, s.
        generated_tokens: number of tokens that the answer has so far, according to the newest report.
        cached_tokens: prompt tokens that are expected in the worker's prefix cache.
    """

    request: PlacementRequest
    state: LeaseState = LeaseState.UNSENT
    ingress: str = ""
    worker: str = ""
    position: int = -1
    num_candidates: int = 0
    similarity: float | None = None
    is_most_similar: bool = False
    reason: str = ""
    policy: str = ""
    queued_at_s: float = 0.0
    first_token_deadline_s: float | None = None
    waited_s: float = 0.0
    generated_tokens: int = 0
    cached_tokens: int = 0

    @property
    def request_id(self) -> str:
        return self.request.request_id

    def become(self, state: LeaseState) -> None:
        """Change to `state`; raise ValueError if the transition is not allowed."""
        if state not in _NEXT[self.state]:
            raise ValueError(f"request {self.request_id} cannot go from {self.state.value} to {state.value}")
        self.state = state


@dataclass(frozen=True, eq=False)
class Loads:
    """Current loads of the decode workers, as columns, so that policies are fast for a thousand workers.

    The arrays are valid only during the call that receives them.

    Attributes:
        in_flight: int64[W], requests.
        kv_tokens: int64[W], prompt + generated tokens of these requests.
        available: bool[W]; False for a worker that must not be chosen.
        prefill_tokens: int64[W], prompt tokens of these requests still to be computed; None if all are 0.
        cached_tokens: int64[W], prompt tokens of the request to place that are expected in the worker's
            prefix cache; None if all are 0.
        lacks_adapter: bool[W], whether the worker would load the request's LoRA adapter; None: no adapter.
    """

    in_flight: NDArray[np.int64]
    kv_tokens: NDArray[np.int64]
    available: NDArray[np.bool_]
    prefill_tokens: NDArray[np.int64] | None = None
    cached_tokens: NDArray[np.int64] | None = None
    lacks_adapter: NDArray[np.bool_] | None = None

    @classmethod
    def from_counts(
        cls, in_flight: ArrayLike, kv_tokens: ArrayLike = 0, available: ArrayLike = True
    ) -> Loads:
        """Create loads from any sequences; a scalar applies to all workers."""
        n = np.array(in_flight, np.int64)
        return cls(n, np.full(n.shape, kv_tokens, np.int64), np.full(n.shape, available, bool))

    def __len__(self) -> int:
        return len(self.in_flight)

    @property
    def available_positions(self) -> NDArray[np.int64]:
        """Return the positions of the available workers, ascending."""
        return np.flatnonzero(self.available)


@dataclass(slots=True)
class Decision:
    """A policy's choice of a worker, with the rule that decided.

    Attributes:
        position: position of the worker in the loads.
        num_candidates: number of candidate workers.
        similarity: cosine to the worker's centroid, if known.
        reason: rule that decided, by default the policy's name; "no-counts", "bad-counts", "no-table",
            "load-cap" or "policy-error" (see GuardedPolicy) if load decided instead.
        policy_data: private data of the policy for its `on_assigned`.
    """

    position: int
    _: KW_ONLY
    num_candidates: int = 1
    similarity: float | None = None
    reason: str = ""
    policy_data: Any = field(default=None, compare=False, repr=False)


class PolicyError(UserInputError):
    """The policy, parameter or value is invalid; the message is one sentence."""


class NoWorkerError(RuntimeError):
    """No worker is available."""
