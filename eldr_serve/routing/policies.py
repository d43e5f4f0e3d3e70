"""Policies: which decode worker takes a prefilled request.

Each is one class with a registered name. The simulator and the server call the same objects. A
request without a usable signature is placed by load; that is never an error.
"""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from eldr_serve.routing.cost import StepCost
from eldr_serve.routing.types import Decision, Loads, NoWorkerError, PlacementRequest, PolicyError, WorkerLoad

_REGISTRY: dict[str, type[Policy]] = {}


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
    """Chooses a worker. Load is counted by the caller (LoadLedger), for all policies alike.

    The caller also tells what became of each request (`on_assigned`, `on_finished`); most policies need not
    know.
    """

    name: ClassVar[str]
    reads_counts: ClassVar[bool] = False  # wants PlacementRequest.signature as counts, not only a similarity

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if name := cls.__dict__.get("name"):
            _REGISTRY[name] = cls

    def __init__(self) -> None:
        self.table: CentroidTable | None = None

    @property
    def parameters(self) -> dict[str, Any]:
        """The parameters that this policy was made with, JSON-able."""
        return {}

    @property
    def predictor_failures(self) -> int:
        """Predictions that could not be used, of a policy that has a predictor."""
        return 0

    def with_table(self, table: CentroidTable | None) -> Policy:
        """This policy, from now on with `table`."""
        self.table = table
        return self

    def choose(
        self, request: PlacementRequest, loads: Loads | Sequence[WorkerLoad], rng: np.random.Generator
    ) -> Decision:
        """Choose among the available workers.

        Args:
            loads: one a worker; indices are what Decision.worker means.
            rng: source of random choices, so that a run repeats by seed.

        Raises:
            NoWorkerError: no worker is available.
        """
        return self._choose(request, Loads.of(loads), rng)

    @abstractmethod
    def _choose(self, request: PlacementRequest, loads: Loads, rng: np.random.Generator) -> Decision: ...

    def on_assigned(self, request: PlacementRequest, worker: int, decision: Decision | None = None) -> None:  # noqa: B027
        """The request runs on `worker` from now on.

        Args:
            decision: what this policy has just decided; None where another chose, or a new policy is told
                of what runs already.
        """

    def on_finished(self, request_id: str) -> None:  # noqa: B027
        """The request no longer runs; unknown ones are ignored."""

    def on_progress(self, generated_tokens: Mapping[str, int]) -> None:  # noqa: B027
        """Requests have generated so many tokens in all, by request id; unknown ones are ignored."""

    def update_cost_model(self, cost: StepCost) -> None:  # noqa: B027
        """The decode engines' steps cost this at present."""


class PooledPolicy(Policy):
    """A policy under which prefilled requests wait together until it gives them workers.

    The caller keeps the pool. It calls `dispatch` when a request has come and when one has left a
    worker, and then `on_assigned` for each request that was given one. `choose` places a request that
    cannot wait.
    """

    @property
    def pooled(self) -> bool:
        """Whether requests wait at all; False sends each at once, by `choose`."""
        return True

    def dispatch(
        self,
        waiting: Sequence[PlacementRequest],
        loads: Loads | Sequence[WorkerLoad],
        rng: np.random.Generator,
    ) -> list[tuple[int, Decision]]:
        """Give workers to some of the waiting requests; the others wait on.

        Args:
            waiting: in order of arrival.
            loads: one a worker, without the requests that are about to be placed.

        Returns:
            (index into `waiting`, decision), each index at most once, in the order of placing.
        """
        return self._dispatch(waiting, Loads.of(loads), rng)

    @abstractmethod
    def _dispatch(
        self, waiting: Sequence[PlacementRequest], loads: Loads, rng: np.random.Generator
    ) -> list[tuple[int, Decision]]: ...


def make_policy(name: str, /, **parameters: Any) -> Policy:
    """The policy of that name.

    Raises:
        PolicyError: unknown name, parameter or value; the message lists what there is.
    """
    cls = _REGISTRY.get(name)
    if cls is None:
        raise PolicyError(f"unknown policy {name!r}; there are {', '.join(policy_names())}")
    known = cls.__init__.__kwdefaults__ or {}
    unknown = sorted(set(parameters) - set(known))
    if unknown:
        takes = f"takes {', '.join(sorted(known))}" if known else "takes no parameter"
        raise PolicyError(f"policy {name!r} has no parameter {unknown[0]!r}; it {takes}")
    return cls(**parameters)


def reads_counts(name: str) -> bool:
    """Whether the policy of that name wants a request's expert counts; False for unknown names."""
    return name in _REGISTRY and _REGISTRY[name].reads_counts


def policy_names() -> list[str]:
    """The registered names, sorted."""
    return sorted(_REGISTRY)


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

    def _choose(self, request: PlacementRequest, loads: Loads, rng: np.random.Generator) -> Decision:
        workers = available(loads)
        return Decision(int(workers[rng.integers(len(workers))]), len(workers), None, self.name)


class RoundRobin(Policy):
    """One worker after the other."""

    name = "round-robin"

    def __init__(self) -> None:
        super().__init__()
        self._last = -1

    def _choose(self, request: PlacementRequest, loads: Loads, rng: np.random.Generator) -> Decision:
        workers = available(loads)
        later = workers[workers > self._last]
        self._last = int(later[0] if len(later) else workers[0])
        return Decision(self._last, len(workers), None, self.name)


class ShortestQueue(Policy):
    """The worker with the fewest requests in flight."""

    name = "shortest-queue"

    def _choose(self, request: PlacementRequest, loads: Loads, rng: np.random.Generator) -> Decision:
        return shortest(available(loads), loads, self.name)


class PowerOfTwo(Policy):
    """The less loaded of two workers drawn at random."""

    name = "power-of-two"

    def _choose(self, request: PlacementRequest, loads: Loads, rng: np.random.Generator) -> Decision:
        workers = available(loads)
        drawn = rng.choice(len(workers), size=min(2, len(workers)), replace=False)
        return shortest(workers[np.sort(drawn)], loads, self.name)


class LeastTokens(Policy):
    """The worker with the fewest KV tokens: prompt + generated, of its requests in flight."""

    name = "least-tokens"

    def _choose(self, request: PlacementRequest, loads: Loads, rng: np.random.Generator) -> Decision:
        workers = available(loads)
        tokens = loads.kv_tokens[workers]
        worker = shortest(workers[tokens == tokens.min()], loads, self.name).worker
        return Decision(worker, len(workers), None, self.name)


class Domain(Policy):
    """The least loaded of the workers whose cluster is mostly of the request's domain.

    Without a table, or for a domain that leads no cluster, one worker is taken by hash of the name.
    """

    name = "domain"

    def _choose(self, request: PlacementRequest, loads: Loads, rng: np.random.Generator) -> Decision:
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

    Parameters:
        band: width tau of the band, cosine similarity in [0, 2]; None takes the table's.
            0 is the nearest centroid alone, 2 is shortest queue.
        max_load_ratio: workers above this times the mean load leave the band, >= 1; None (as in the
            paper) sets no bound. Where it would leave no worker, the shortest queue is taken.
    """

    name = "locality-band"

    def __init__(self, *, band: float | None = None, max_load_ratio: float | None = None) -> None:
        super().__init__()
        if band is not None and not in_range(band, 0.0, 2.0):
            raise PolicyError(f"band is {band!r}, it must be a cosine distance from 0 to 2")
        if max_load_ratio is not None and not in_range(max_load_ratio, 1.0, 1e6):
            raise PolicyError(f"max_load_ratio is {max_load_ratio!r}, it must be from 1 to 1000000")
        self._band = band
        self._max_load_ratio = max_load_ratio

    @property
    def parameters(self) -> dict[str, Any]:
        return {"band": self._band, "max_load_ratio": self._max_load_ratio}

    def _choose(self, request: PlacementRequest, loads: Loads, rng: np.random.Generator) -> Decision:
        workers = available(loads)
        if self.table is None:
            return self._lightest(workers, request, loads, "no-table")
        scored, why_not = self._score(request)
        if scored is None:
            return self._lightest(workers, request, loads, why_not)
        similarity = worker_similarity(scored, len(loads)).astype(np.float64)
        width = self.table.band if self._band is None else self._band
        band = workers[similarity[workers] >= similarity[workers].max() - width]
        if self._max_load_ratio is not None:
            mean = (loads.in_flight[workers].sum() + 1) / len(workers)
            allowed = band[loads.in_flight[band] + 1 <= self._max_load_ratio * mean]
            if not len(allowed):
                return self._lightest(workers, request, loads, "load-cap")
            band = allowed
        return self._lightest(band, request, loads, self.name, similarity)

    def _lightest(
        self,
        candidates: NDArray[np.int64],
        request: PlacementRequest,
        loads: Loads,
        reason: str,
        similarity: NDArray[np.float64] | None = None,
    ) -> Decision:
        """The candidate with the least load; of equals the most similar one."""
        if similarity is None:
            return shortest(candidates, loads, reason)
        in_flight = loads.in_flight[candidates]
        lightest = candidates[in_flight == in_flight.min()]
        worker = int(lightest[similarity[lightest].argmax()])
        return Decision(worker, len(candidates), float(similarity[worker]), reason)

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


def in_range(value: Any, low: float, high: float) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and low <= value <= high
