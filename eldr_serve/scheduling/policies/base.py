"""The policy interface: a policy chooses the decode worker of a prefilled request.

Each policy is one class, and the simulator and the server call the same objects. A request without usable
expert counts is placed by load, which is never an error.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from eldr_serve.scheduling.cost import StepCost
from eldr_serve.scheduling.parameters import PolicyParameters, validate
from eldr_serve.scheduling.types import Decision, Loads, NoWorkerError, PlacementRequest


class CentroidTable(Protocol):
    """The part of RoutingTable that policies use."""

    @property
    def centroids(self) -> NDArray[np.float32]: ...
    @property
    def band(self) -> float: ...
    @property
    def domains(self) -> list[str]: ...
    def similarity(self, expert_counts: NDArray[Any], /) -> NDArray[np.float32]: ...


class Policy(ABC):
    """Base class of policies; a subclass defines `select` and, if it has parameters, a nested `Parameters`.

    The caller counts load (LoadLedger) in the same way for all policies, and reports the progress of each
    request (`on_assigned`, `on_progress`, `on_finished`, `on_aborted`); most policies ignore it.
    `check_policy` lists violations of this interface.

    Attributes:
        name: name in settings, decisions and metrics; by default the import path.
        reads_counts: whether PlacementRequest.expert_counts must be counts, not only a similarity.
        is_balancer: whether the policy places by load or chance alone; comparisons use it as a baseline.
        parameters: all parameters of the instance.
        table: the live table, or None.
    """

    name: ClassVar[str]
    reads_counts: ClassVar[bool] = False
    is_balancer: ClassVar[bool] = False

    class Parameters(PolicyParameters):
        """No parameters; subclasses may declare some."""

    parameters: Parameters

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "name" not in cls.__dict__:
            cls.name = f"{cls.__module__}:{cls.__qualname__}"

    def __init__(self, **parameters: Any) -> None:
        """Validate the parameters; raise PolicyError if one is unknown or out of range."""
        self.parameters = validate(self.Parameters, self.name, parameters)
        self.table: CentroidTable | None = None

    @property
    def predictor_failures(self) -> int:
        """Return the number of unusable predictions; 0 if the policy has no predictor."""
        return 0

    def set_table(self, table: CentroidTable | None) -> Policy:
        """Set the table and return this policy."""
        self.table = table
        return self

    @abstractmethod
    def select(self, request: PlacementRequest, loads: Loads, rng: np.random.Generator) -> Decision:
        """Choose one of the available workers, without changing `loads` or the request.

        Args:
            request: the request to place.
            loads: current loads; Decision.position is an index into them.
            rng: the only source of randomness, so that a seed reproduces a run.

        Raises:
            NoWorkerError: no worker is available.
        """

    def on_assigned(self, request: PlacementRequest, position: int, decision: Decision | None = None) -> None:  # noqa: B027
        """Process the assignment of a request to a worker; it no longer runs on its previous worker.

        Args:
            position: position of the worker in the loads.
            decision: the decision that this policy has just made (see `Decision.policy_data`); None if it did
                not choose the worker, or if the request ran before the policy was set.
        """

    def on_finished(self, request_id: str) -> None:  # noqa: B027
        """Process the end of a request; unknown ones are ignored.

        The request has a complete answer, or it was cancelled while it waited for a worker.
        """

    def on_aborted(self, request_id: str) -> None:
        """Process the end of a request on its worker, before its answer was complete; its length is unknown.

        A request that is cancelled while it waits for a worker ends with `on_finished`.
        """
        self.on_finished(request_id)

    def on_workers_changed(self, workers: Sequence[str | None]) -> None:  # noqa: B027
        """Process the worker of each position, None for a vacant one; for the names see `worker_names`.

        `on_assigned` follows for the running requests.
        """

    def on_progress(self, generated_tokens: Mapping[str, int]) -> None:  # noqa: B027
        """Process totals of generated tokens by request id; unknown ones are ignored."""

    def update_cost_model(self, cost: StepCost) -> None:  # noqa: B027
        """Process a new estimate of the decode engines' step cost."""


class QueuedPolicy(Policy):
    """A policy under which prefilled requests wait in the decode queue until it assigns them workers.

    The caller keeps the queue. It calls `dispatch` when a request arrives or ends, and then `on_assigned`
    for each placed request. `select` places a request that cannot wait.
    """

    @property
    def has_queue(self) -> bool:
        """Return whether requests wait; if False, `select` places each at once."""
        return True

    def slots_per_worker(self) -> int | None:
        """Return the value of a parameter `slots`, the limit of requests on a worker; None if it has none."""
        parameters = getattr(self, "parameters", None)  # None if a subclass skips Policy.__init__
        return getattr(parameters, "slots", None)

    @abstractmethod
    def dispatch(
        self, waiting: Sequence[PlacementRequest], loads: Loads, rng: np.random.Generator
    ) -> list[tuple[int, Decision]]:
        """Assign workers to some of the waiting requests; the others continue to wait.

        Args:
            waiting: requests in order of arrival.
            loads: current loads, without the waiting requests; must not be changed.

        Returns:
            (index into `waiting`, decision), each index at most once, in the order of placing.
        """


def worker_similarity(similarity: NDArray[np.float32], num_workers: int) -> NDArray[np.float32]:
    """Return the cosine of each worker, float32[W], from the cosine of each centroid, float32[K].

    With K >= W, worker w serves the centroids c with c mod W == w and takes the largest cosine. With
    K < W, worker w serves centroid w mod K, so that load decides between workers that share a centroid.
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


def is_most_similar(position: int, request: PlacementRequest, loads: Loads) -> bool:
    """Return whether no available worker has a centroid that is more similar to the request."""
    if request.similarity is None:
        return False
    similarity = worker_similarity(request.similarity, len(loads))
    return bool(similarity[position] >= similarity[loads.available].max())


def available_workers(loads: Loads) -> NDArray[np.int64]:
    """Return the positions of the available workers, ascending; raise NoWorkerError if there are none."""
    positions = loads.available_positions
    if not len(positions):
        raise NoWorkerError(f"none of {len(loads)} decode workers is available")
    return positions


def choose_shortest(candidates: NDArray[np.int64], loads: Loads, reason: str) -> Decision:
    """Choose the candidate with the fewest requests; the first in case of a tie."""
    position = int(candidates[loads.in_flight[candidates].argmin()])
    return Decision(position, num_candidates=len(candidates), reason=reason)
