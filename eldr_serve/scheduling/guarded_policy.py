"""Protection of routing against failures of a policy."""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from eldr_serve.scheduling.cost import StepCost
from eldr_serve.scheduling.policies.base import Policy, QueuedPolicy, available_workers
from eldr_serve.scheduling.types import Decision, Loads, NoWorkerError, PlacementRequest

logger = logging.getLogger(__name__)


class GuardedPolicy:
    """A policy with a fallback: if it fails, the worker with the fewest requests is chosen ("policy-error").

    If a notification fails, the policy misses that event; other events are not affected.

    Args:
        on_policy_error: callback for each exception; may raise it again.
    """

    def __init__(self, policy: Policy, on_policy_error: Callable[[Exception], None]) -> None:
        self.policy = policy
        self._on_policy_error = on_policy_error
        self._logged = False

    @property
    def name(self) -> str:
        """Return the policy's name; the name of its class if it has none."""
        return getattr(self.policy, "name", type(self.policy).__name__)

    @property
    def has_queue(self) -> bool:
        """Return whether requests wait for `dispatch`."""
        try:
            return isinstance(self.policy, QueuedPolicy) and self.policy.has_queue
        except Exception as error:
            self._log(error)
            return False

    def select(self, request: PlacementRequest, loads: Loads, rng: np.random.Generator) -> Decision:
        """Return the policy's decision, or the least loaded worker if the policy fails."""
        try:
            return _check_decision(self.policy.select(request, loads, rng), loads)
        except NoWorkerError:
            raise
        except Exception as error:
            self._log(error)
            return _choose_by_load(1, loads)[0]

    def dispatch(
        self, waiting: Sequence[PlacementRequest], loads: Loads, rng: np.random.Generator
    ) -> list[tuple[int, Decision]]:
        """Return the policy's assignments of waiting requests, or assignments by load if the policy fails.

        If it fails and has a parameter `slots`, only as many requests are placed as there are free slots, and
        the others wait for the next call. Without the parameter no limit is known, so all are placed.
        """
        assert isinstance(self.policy, QueuedPolicy)
        try:
            assigned = self.policy.dispatch(waiting, loads, rng)
            _check_indices([index for index, _ in assigned], len(waiting))
            return [(index, _check_decision(decision, loads)) for index, decision in assigned]
        except Exception as error:
            self._log(error)
            return list(enumerate(_choose_by_load(len(waiting), loads, self._slots_per_worker())))

    def _slots_per_worker(self) -> int | None:
        assert isinstance(self.policy, QueuedPolicy)
        try:
            return self.policy.slots_per_worker()
        except Exception as error:
            self._log(error)
            return None

    def on_assigned(self, request: PlacementRequest, position: int, decision: Decision | None = None) -> None:
        """Notify the policy that a request has a worker."""
        self._notify(lambda: self.policy.on_assigned(request, position, decision))

    def on_finished(self, request_id: str) -> None:
        """Notify the policy that a request has ended."""
        self._notify(lambda: self.policy.on_finished(request_id))

    def on_aborted(self, request_id: str) -> None:
        """Notify the policy that a request has ended without a complete answer."""
        self._notify(lambda: self.policy.on_aborted(request_id))

    def on_workers_changed(self, workers: Sequence[str | None]) -> None:
        """Notify the policy of the worker of each position."""
        self._notify(lambda: self.policy.on_workers_changed(workers))

    def on_progress(self, generated_tokens: Mapping[str, int]) -> None:
        """Notify the policy of the totals of generated tokens by request id."""
        self._notify(lambda: self.policy.on_progress(generated_tokens))

    def update_cost_model(self, cost: StepCost) -> None:
        """Give the policy a new cost of a decode step."""
        self._notify(lambda: self.policy.update_cost_model(cost))

    def _notify(self, notify: Callable[[], None]) -> None:
        try:
            notify()
        except Exception as error:
            self._log(error)

    def _log(self, error: Exception) -> None:
        self._on_policy_error(error)
        if not self._logged:
            self._logged = True
            logger.warning("policy %s failed; requests are placed by load", self.name, exc_info=error)


def _check_indices(indices: list[int], waiting: int) -> None:
    if not all(0 <= operator.index(index) < waiting for index in indices):
        raise ValueError(f"the policy assigns requests {indices}, but {waiting} wait")
    if len(set(indices)) < len(indices):
        raise ValueError(f"the policy assigns a request twice: {indices}")


def _check_decision(decision: Decision, loads: Loads) -> Decision:
    """Return the decision with plain Python values, which metrics and messages require.

    Raises:
        TypeError, ValueError: a field has another type, or the worker is not available.
    """
    position = operator.index(decision.position)
    if not (0 <= position < len(loads) and loads.available[position]):
        raise ValueError(f"the worker at position {position} is not available")
    return Decision(
        position,
        num_candidates=operator.index(decision.num_candidates),
        similarity=None if decision.similarity is None else float(decision.similarity),
        reason=str(decision.reason),
        policy_data=decision.policy_data,
    )


def _choose_by_load(num_requests: int, loads: Loads, slots: int | None = None) -> list[Decision]:
    """Choose the least loaded worker for each of at most `num_requests` requests, one after the other.

    Args:
        slots: maximum number of requests on a worker; None: no maximum.
    """
    positions, in_flight = available_workers(loads), loads.in_flight.copy()
    decisions = []
    for _ in range(num_requests):
        position = int(positions[in_flight[positions].argmin()])
        if slots is not None and in_flight[position] >= slots:
            break
        in_flight[position] += 1
        decisions.append(Decision(position, num_candidates=len(positions), reason="policy-error"))
    return decisions
