"""Steps of replicas whose data-parallel ranks wait for each other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eldr_serve.scheduling.cost import StepCost
from eldr_serve.scheduling.types import Loads
from eldr_serve.scheduling.worker_names import rank_of, replica_of


class StepBarrier:
    """The replica of each worker; all ranks of a replica end a step together.

    The requests and KV tokens of a step take as long as they do on the slowest rank. The experts that the
    requests of all ranks activate are assumed to be divided evenly among the ranks, since the router does not
    know which rank has which expert.

    Args:
        workers: the worker in each position; None for a vacant one.

    Attributes:
        first_positions: int64[W], the position of the first rank of each worker's replica.
    """

    def __init__(self, workers: Sequence[str | None]) -> None:
        replicas = np.array(["" if worker is None else replica_of(worker) for worker in workers])
        _, first_positions, self._replica, num_ranks = np.unique(
            replicas, return_index=True, return_inverse=True, return_counts=True
        )
        self.first_positions = first_positions[self._replica]
        self._num_ranks = num_ranks[self._replica]
        self._order = np.argsort(self._replica, kind="stable")
        self._starts = np.cumsum(num_ranks) - num_ranks

    @classmethod
    def from_workers(cls, workers: Sequence[str | None]) -> StepBarrier | None:
        """Return the barrier; None if no worker is a data-parallel rank."""
        has_ranks = any(worker is not None and rank_of(worker) is not None for worker in workers)
        return cls(workers) if has_ranks else None

    def reduce_over_ranks(self, ufunc: np.ufunc, values: NDArray[Any]) -> NDArray[Any]:
        """Return `ufunc` over the values of the ranks of each worker's replica, [W]."""
        combined: NDArray[Any] = ufunc.reduceat(values[self._order], self._starts)[self._replica]
        return combined

    def added_seconds(
        self,
        cost: StepCost,
        positions: NDArray[np.int64],
        loads: Loads,
        active_experts: Any,
        *,
        more_tokens: int,
        more_experts: Any,
    ) -> tuple[Any, Any]:
        """Return the time that a request at each position adds over all requests of its replica, s.

        Also return the time of a step of the replica with the request, s.

        Args:
            active_experts: experts that the requests of all ranks of the worker's replica activate.
            more_tokens: KV tokens of the new request.
            more_experts: active experts that it adds to the replica's.
        """
        rank_s = cost.seconds(loads.in_flight, loads.kv_tokens, 0)
        slowest_s = self.reduce_over_ranks(np.maximum, rank_s)[positions]
        requests = self.reduce_over_ranks(np.add, loads.in_flight)[positions]
        own_s = cost.seconds(loads.in_flight[positions] + 1, loads.kv_tokens[positions] + more_tokens, 0)
        expert_s = cost.per_expert_s / self._num_ranks[positions]
        before_s = slowest_s + expert_s * active_experts
        after_s = np.maximum(slowest_s, own_s) + expert_s * (active_experts + more_experts)
        return (requests + 1) * after_s - requests * before_s, after_s

    def least_loaded_ranks(
        self, positions: NDArray[np.int64], loads: Loads, cost: StepCost, added_s: NDArray[np.float64]
    ) -> NDArray[np.int64]:
        """Return one position per replica: the one with the least `added_s`; load breaks ties.

        Args:
            added_s: float64[n], time that a request would add at each of `positions`.
        """
        in_flight, kv_tokens = loads.in_flight[positions], loads.kv_tokens[positions]
        order = np.lexsort((kv_tokens, in_flight, cost.seconds(in_flight, kv_tokens, 0), added_s))
        by_cost = positions[order]
        _, best = np.unique(self.first_positions[by_cost], return_index=True)
        return np.asarray(by_cost[best])
