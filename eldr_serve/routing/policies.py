"""What a policy is, and the plain ones: which decode worker takes a prefilled request.

Each is one class. The simulator and the server call the same objects. A request without a usable
signature is placed by load; that is never an error.
"""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from eldr_serve.routing.cost import StepCost
from eldr_serve.routing.parameters import PolicyParameters, validated
from eldr_serve.routing.types import Decision, Loads, NoWorkerError, PlacementRequest


class CentroidTable(Protocol):
    """What a policy needs of a RoutingTable."""

    @property
    def centroids(self) -> NDArray[np.float32]: ...
    @property
    def band(self) -> float: ...
    @property
    def domains(self) -> list[str]: ...
    def similarity(self, signature: NDArray[Any]) -> NDArray[np.float32]: ...


class Policy(ABC):
    """Chooses a worker: a subclass defines `select`, and a nested `Parameters` where it has any.

    The caller counts load (LoadLedger), for all policies alike, and tells what became of each request
    (`on_assigned`, `on_progress`, `on_finished`); most policies need not know. `check_policy` says what
    a class breaks of this.

    Attributes:
        name: in settings, decisions and metrics; without one, the import path.
        reads_counts: wants PlacementRequest.signature as counts, not only a similarity.
        parameters: those that it was made with, all of them.
        table: the live one, or None.
    """

    name: ClassVar[str]
    reads_counts: ClassVar[bool] = False

    class Parameters(PolicyParameters):
        """No parameters, unless a subclass declares some."""

    parameters: Parameters

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "name" not in cls.__dict__:
            cls.name = f"{cls.__module__}:{cls.__qualname__}"

    def __init__(self, **parameters: Any) -> None:
        """PolicyError, one sentence, for a parameter that there is not or that is out of range."""
        self.parameters = validated(self.Parameters, self.name, parameters)
        self.table: CentroidTable | None = None

    @property
    def predictor_failures(self) -> int:
        """Predictions that could not be used, of a policy that has a predictor."""
        return 0

    def with_table(self, table: CentroidTable | None) -> Policy:
        """This policy, from now on with `table`."""
        self.table = table
        return self

    @abstractmethod
    def select(self, request: PlacementRequest, loads: Loads, rng: np.random.Generator) -> Decision:
        """Choose one of the available workers; changes neither `loads` nor the request.

        Args:
            loads: indices are what Decision.worker means.
            rng: source of random choices, so that a run repeats by seed.

        Raises:
            NoWorkerError: no worker is available.
        """

    def on_assigned(self, request: PlacementRequest, worker: int, decision: Decision | None = None) -> None:  # noqa: B027
        """The request runs on `worker` from now on, and no longer where it ran before.

        Args:
            decision: what this policy has just decided, with what it learnt by it (`Decision.learnt`); None
                where another chose, or a new policy is told of what runs already.
        """

    def on_finished(self, request_id: str) -> None:  # noqa: B027
        """The request no longer runs; unknown ones are ignored."""

    def on_progress(self, generated_tokens: Mapping[str, int]) -> None:  # noqa: B027
        """Requests have generated so many tokens in all, by request id; unknown ones are ignored."""

    def update_cost_model(self, cost: StepCost) -> None:  # noqa: B027
        """The decode engines' steps cost this at present."""


class QueuedPolicy(Policy):
    """A policy under which prefilled requests wait in the decode queue until it gives them workers.

    The caller keeps the queue. It calls `dispatch` when a request has come and when one has left a
    worker, and then `on_assigned` for each request that was given one. `select` places a request that
    cannot wait.
    """

    @property
    def queues(self) -> bool:
        """Whether requests wait at all; False sends each at once, by `select`."""
        return True

    @abstractmethod
    def dispatch(
        self, waiting: Sequence[PlacementRequest], loads: Loads, rng: np.random.Generator
    ) -> list[tuple[int, Decision]]:
        """Give workers to some of the waiting requests; the others wait on.

        Args:
            waiting: in order of arrival.
            loads: one a worker, without the requests that are about to be placed; not changed.

        Returns:
            (index into `waiting`, decision), each index at most once, in the order of placing.
        """


def worker_similarity(similarity: NDArray[np.float32], num_workers: int) -> NDArray[np.float32]:
    """float32[W] cosine of each worker, from float32[K] of each centroid, where K need not be W.

    With K >= W, worker w serves the centroids c with c mod W == w, and counts the best of them. With
    K < W, worker w serves centroid w mod K, so that workers share one and load decides between them.
    """
    k = len(similarity)
    if k == num_workers:
        return similarity
    if k < num_workers:
        shared: NDArray[np.float32] = similarity[np.arange(num_workers) % k]
        return shared
    padded = np.full(-(-k // num_workers) * num_workers, -np.inf, np.float32)
    padded[:k] = similarity
    best: NDArray[np.float32] = padded.reshape(-1, num_workers).max(axis=0)
    return best


def available(loads: Loads) -> NDArray[np.int64]:
    workers = loads.workers
    if not len(workers):
        raise NoWorkerError(f"none of {len(loads)} decode workers is available")
    return workers


def shortest(candidates: NDArray[np.int64], loads: Loads, reason: str) -> Decision:
    """The candidate with the fewest requests; of equals the first."""
    worker = int(candidates[loads.in_flight[candidates].argmin()])
    return Decision(worker, len(candidates), None, reason)


class Random(Policy):
    """Any worker, each as likely."""

    name = "random"

    def select(self, request: PlacementRequest, loads: Loads, rng: np.random.Generator) -> Decision:
        workers = available(loads)
        return Decision(int(workers[rng.integers(len(workers))]), len(workers), None, self.name)


class RoundRobin(Policy):
    """One worker after the other."""

    name = "round-robin"

    def __init__(self) -> None:
        super().__init__()
        self._last = -1

    def select(self, request: PlacementRequest, loads: Loads, rng: np.random.Generator) -> Decision:
        workers = available(loads)
        later = workers[workers > self._last]
        self._last = int(later[0] if len(later) else workers[0])
        return Decision(self._last, len(workers), None, self.name)


class ShortestQueue(Policy):
    """The worker with the fewest requests in flight."""

    name = "shortest-queue"

    def select(self, request: PlacementRequest, loads: Loads, rng: np.random.Generator) -> Decision:
        return shortest(available(loads), loads, self.name)


class PowerOfTwo(Policy):
    """The less loaded of two workers drawn at random."""

    name = "power-of-two"

    def select(self, request: PlacementRequest, loads: Loads, rng: np.random.Generator) -> Decision:
        workers = available(loads)
        drawn = rng.choice(len(workers), size=min(2, len(workers)), replace=False)
        return shortest(workers[np.sort(drawn)], loads, self.name)


class LeastTokens(Policy):
    """The worker with the fewest KV tokens: prompt + generated, of its requests in flight."""

    name = "least-tokens"

    def select(self, request: PlacementRequest, loads: Loads, rng: np.random.Generator) -> Decision:
        workers = available(loads)
        tokens = loads.kv_tokens[workers]
        worker = shortest(workers[tokens == tokens.min()], loads, self.name).worker
        return Decision(worker, len(workers), None, self.name)


class Domain(Policy):
    """The least loaded of the workers whose cluster is mostly of the request's domain.

    Without a table, or for a domain that leads no cluster, one worker is taken by hash of the name.
    """

    name = "domain"

    def select(self, request: PlacementRequest, loads: Loads, rng: np.random.Generator) -> Decision:
        workers = available(loads)
        if request.domain is None:
            return shortest(workers, loads, "no-domain")
        domains = self.table.domains if self.table is not None else []
        own = [w for w in workers.tolist() if request.domain in _served(domains, w, len(loads))]
        if own:
            return shortest(np.array(own), loads, self.name)
        worker = int(workers[zlib.crc32(request.domain.encode()) % len(workers)])
        return Decision(worker, 1, None, "domain-hash")


def _served(domains: Sequence[str], worker: int, num_workers: int) -> Sequence[str]:
    if len(domains) >= num_workers:
        return domains[worker::num_workers]
    return [domains[worker % len(domains)]] if domains else []


class LocalityBand(Policy):
    """ELDR's rule (paper, section 4.3.2): the least loaded worker within the band of the best match.

    Where the load bound would leave no worker of the band, the shortest queue is taken.
    """

    name = "locality-band"

    class Parameters(Policy.Parameters):
        band: float | None = Field(
            default=None,
            ge=0,
            le=2,
            description="width of the band, cosine similarity: 0 is the nearest centroid alone, 2 is "
            "shortest queue; null takes the table's",
        )
        max_load_ratio: float | None = Field(
            default=None,
            ge=1,
            le=1e6,
            description="workers above this times the mean load leave the band; null, as in the paper: none",
        )

    parameters: Parameters

    def select(self, request: PlacementRequest, loads: Loads, rng: np.random.Generator) -> Decision:
        workers = available(loads)
        if self.table is None:
            return shortest(workers, loads, "no-table")
        scored, why_not = self._score(request)
        if scored is None:
            return shortest(workers, loads, why_not)
        similarity = worker_similarity(scored, len(loads)).astype(np.float64)
        width = self.table.band if self.parameters.band is None else self.parameters.band
        band = workers[similarity[workers] >= similarity[workers].max() - width]
        if (bound := self.parameters.max_load_ratio) is not None:
            mean = (loads.in_flight[workers].sum() + 1) / len(workers)
            allowed = band[loads.in_flight[band] + 1 <= bound * mean]
            if not len(allowed):
                return shortest(workers, loads, "load-cap")
            band = allowed
        in_flight = loads.in_flight[band]
        lightest = band[in_flight == in_flight.min()]
        worker = int(lightest[similarity[lightest].argmax()])
        return Decision(worker, len(band), float(similarity[worker]), self.name)

    def _score(self, request: PlacementRequest) -> tuple[NDArray[np.float32] | None, str]:
        assert self.table is not None
        similarity = request.similarity
        if similarity is None:
            if request.signature is None:
                return None, "no-signature"
            try:
                similarity = self.table.similarity(request.signature)
            except ValueError:
                return None, "bad-signature"
        if len(similarity) != len(self.table.centroids) or not np.isfinite(similarity).all():
            return None, "bad-signature"
        # A signature of zeros (every expert common, or no count) is equally far from all centroids.
        return (similarity, "") if np.any(similarity) else (None, "no-signature")
