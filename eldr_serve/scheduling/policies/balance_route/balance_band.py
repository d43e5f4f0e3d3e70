"""Marginal cost while slots are free; above saturation, expert locality within a band of good balance."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from eldr_serve.scheduling.activation import ExpectedActivation, activation_of
from eldr_serve.scheduling.cost import StepCost
from eldr_serve.scheduling.parameters import Count
from eldr_serve.scheduling.policies.balance_route.balance import BalanceRouteHorizon, Overtakes, prompt_tokens
from eldr_serve.scheduling.policies.balance_route.dispatch import WaitingTokens
from eldr_serve.scheduling.policies.balance_route.fscore import FScore
from eldr_serve.scheduling.types import Decision, Loads, PlacementRequest


class BalanceBand(BalanceRouteHorizon):
    """The inverse of ELDR's rule: balance selects the candidates, and expert affinity decides between them.

    While there is a free slot for every waiting request, a request goes to the worker where it adds the least
    decode time, as in marginal-cost with `affinity` 0. While more requests wait than slots are
    free, the policy compares the pairs of a request and a free worker whose F is within a band of the best F.
    The pair with the fewest excess experts wins. These are the experts that the request adds at the worker
    beyond those that it would add at its best worker. Since batches are then full in any case, the policy
    chooses only which request comes next.

    If no waiting request has expert counts, or without the queue, the policy is balance-route-horizon.
    """

    name = "balance-band"
    reads_counts = True

    class Parameters(BalanceRouteHorizon.Parameters):
        lookahead: Count = Field(default=128, description="longest-waiting requests that are compared")
        max_overtakes: Overtakes = 512
        band_tokens: float = Field(
            default=1500.0,
            ge=0,
            le=1e9,
            description="width of the band below the best F, admitted tokens: 0 is balance alone, large "
            "values are locality alone",
        )

    parameters: Parameters

    def __init__(self, **parameters: Any) -> None:
        super().__init__(**parameters)
        self._cost = StepCost()
        self._activation = ExpectedActivation()
        self._p: dict[str, NDArray[np.float32]] = {}  # p of each waiting request

    def update_cost_model(self, cost: StepCost) -> None:
        self._cost = cost

    def on_assigned(self, request: PlacementRequest, position: int, decision: Decision | None = None) -> None:
        super().on_assigned(request, position, decision)
        self._activation.on_assigned(request, position, self._activation.estimate_levels(request))

    def on_finished(self, request_id: str) -> None:
        super().on_finished(request_id)
        self._activation.on_finished(request_id)

    def _fill(
        self,
        waiting: Sequence[PlacementRequest],
        overdue: int,
        loads: Loads,
        positions: NDArray[np.int64],
        free: NDArray[np.int64],
    ) -> list[tuple[int, int]]:
        p = self._probabilities(waiting)
        if p is None:
            return super()._fill(waiting, overdue, loads, positions, free)
        self._activation.grow(len(loads))
        batches = _Batches(
            self._project_waiting(waiting),
            prompt_tokens(waiting),
            p,
            free,
            loads.in_flight[positions].astype(np.float64),
            self._project(loads)[positions],
            self._activation.p_idle[positions],
            self._activation.expected_active[positions],
        )
        band = self.parameters.band_tokens * self._horizon_score.gain
        assigned: list[tuple[int, int]] = []
        for columns in np.split(np.arange(len(waiting)), [overdue]):
            while len(columns) and free.any():
                if len(waiting) - len(assigned) <= free.sum():
                    row, column = batches.cheapest_row(int(columns[0]), self._cost), int(columns[0])
                else:
                    row, column = batches.best_pair(
                        columns[: self.parameters.lookahead], self._horizon_score, band
                    )
                batches.admit(row, column)
                columns = columns[columns != column]
                assigned.append((column, row))
        return assigned

    def _probabilities(self, waiting: Sequence[PlacementRequest]) -> NDArray[np.float32] | None:
        """Return p of the requests, float32[n, L*E], zeros if unknown; None if all are unknown."""
        probabilities: dict[str, NDArray[np.float32]] = {}
        for request in waiting:
            p = self._p.get(request.request_id)
            if p is None and (levels := self._activation.estimate_levels(request)) is not None:
                p = activation_of(levels)
            if p is not None:
                probabilities[request.request_id] = p
        self._p = probabilities
        if not probabilities:
            return None
        zeros = np.zeros_like(next(iter(probabilities.values())))
        return np.stack([probabilities.get(request.request_id, zeros) for request in waiting])


class _Batches:
    """The batches of the available workers, one row each, and n requests that may join, one column each.

    Args:
        waiting_tokens: tokens of the requests.
        tokens: float64[n], prompt tokens.
        p: float32[n, L*E], probability that a step of the request activates the expert.
        free: int64[W], free slots; changed in place.
        in_flight: float64[W], requests.
        kv_tokens: float64[W, H+1], KV tokens h steps ahead.
        p_idle, expected_active: rows of ExpectedActivation.
    """

    def __init__(
        self,
        waiting_tokens: WaitingTokens,
        tokens: NDArray[np.float64],
        p: NDArray[np.float32],
        free: NDArray[np.int64],
        in_flight: NDArray[np.float64],
        kv_tokens: NDArray[np.float64],
        p_idle: NDArray[np.float32],
        expected_active: NDArray[np.float64],
    ) -> None:
        self._waiting_tokens, self._tokens, self._p, self._free = waiting_tokens, tokens, p, free
        self._in_flight, self._kv_tokens = in_flight, kv_tokens
        self._p_idle, self._expected_active = p_idle, expected_active
        self._added = p_idle @ p.T  # experts that each request would add to each worker, [W, n]

    def cheapest_row(self, column: int, cost: StepCost) -> int:
        """Return the row of the free worker where the request adds the least decode time to all requests."""
        added_s, _ = cost.added_seconds(
            self._in_flight,
            self._kv_tokens[:, 0],
            self._expected_active,
            more_tokens=self._tokens[column],
            more_experts=self._added[:, column],
        )
        return int(np.where(self._free > 0, added_s, np.inf).argmin())

    def best_pair(self, columns: NDArray[np.int64], score: FScore, band: float) -> tuple[int, int]:
        """Return the (row, column) with the fewest excess experts, if F is within `band` of the best.

        Excess experts are those added beyond the minimum over all workers.
        """
        free_rows = np.flatnonzero(self._free)
        margins = self._kv_tokens.max(axis=0) - self._kv_tokens[free_rows]
        value = score(self._waiting_tokens.counted_tokens[columns], margins[:, None])
        added = self._added[:, columns]
        excess = (added - added.min(axis=0))[free_rows]
        excess[value < value.max() - band] = np.inf
        row, chosen = np.unravel_index(int(excess.argmin()), excess.shape)
        return int(free_rows[row]), int(columns[chosen])

    def admit(self, row: int, column: int) -> None:
        """Add the column's request to the worker's batch."""
        self._free[row] -= 1
        self._in_flight[row] += 1
        self._kv_tokens[row] += self._waiting_tokens.kv_tokens[column]
        self._expected_active[row] += self._added[row, column]
        self._p_idle[row] *= 1 - self._p[column]
        self._added[row] = self._p_idle[row] @ self._p.T
