"""Placement by the marginal cost of decode and, on whole replicas, of prefill, without calibration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from eldr_serve.scheduling.activation import ExpectedActivation, Levels, activation_of
from eldr_serve.scheduling.barrier import StepBarrier
from eldr_serve.scheduling.cost import StepCost
from eldr_serve.scheduling.parameters import Weight
from eldr_serve.scheduling.policies.base import Policy, available_workers, choose_shortest
from eldr_serve.scheduling.profiles import AffinityProfiles, deviation_of
from eldr_serve.scheduling.types import Decision, Loads, PlacementRequest

# Above _MAX_EXACT_WORKERS workers, finalists are selected with the experts of every eighth layer, and then
# compared exactly.
_MAX_EXACT_WORKERS = 512
_FINALISTS = 32
_DEFAULT_ANSWER_TOKENS = 128.0  # mean length of answers until one has ended
_ANSWER_TIME_CONSTANT = 64  # time constant of the mean length, answers
# A tail power raises the cost above these multiples of the median step time and of the mean batch. The batch
# counts too, because estimated step times are too low if answers use other experts than their prompts.
_SLOW_STEP = 1.05
_LARGE_BATCH = 1.5


class RequestEstimate(NamedTuple):
    """The estimated expert activation of a request to place."""

    request: PlacementRequest
    levels: Levels
    activation: NDArray[np.float32]
    deviation: NDArray[np.float32] | None  # None if the request has no counts or affinity is 0


class References(NamedTuple):
    """The figures of all candidates with which each one is compared.

    Attributes:
        step_s: median step time with the request, s.
        batch: mean batch with the request.
        similarity: largest similarity of a profile to the request.
    """

    step_s: float
    batch: float
    similarity: float


class WorkerCosts(NamedTuple):
    """The costs of a request at n workers before affinity and the tail, float64[n] each.

    Attributes:
        decode, prefill: seconds per step.
        step_s: step time with the request, which includes its prefill and pending prompts, s.
        batch: batch with the request.
    """

    decode: NDArray[np.float64]
    prefill: NDArray[np.float64]
    step_s: NDArray[np.float64]
    batch: NDArray[np.float64]

    def references(self, similarity: float = 0.0) -> References:
        return References(float(np.median(self.step_s)), float(self.batch.mean()), similarity)

    def tail_factor(self, power: float, references: References) -> NDArray[np.float64] | float:
        """Return the factor, 1 or more, by which workers with slow steps or large batches cost more."""
        if power == 1:
            return 1.0
        step_excess = self.step_s / (_SLOW_STEP * references.step_s or 1.0)  # the median is 0 without costs
        batch_excess = self.batch / (_LARGE_BATCH * references.batch)
        factor: NDArray[np.float64] = np.maximum(np.maximum(step_excess, batch_excess), 1) ** (power - 1)
        return factor


class MarginalCost(Policy):
    """Chooses the worker on which the request adds least to the time of all requests.

    The added time is weighted by a penalty for slow or full workers, and by the worker's affinity profile.

    docs/policies.md explains the formulas. The cost of a worker, in seconds per step, consists of:

    1. Decode: the time of the request's step, and the time that the request adds to the step of each other
       request there. The active experts of a batch are estimated from the counts of its requests' prefills.
       Affinity profiles change this cost, so that workers specialise online (see AffinityProfiles).
    2. Prefill, only on whole replicas: prompt tokens that the worker's prefix cache lacks delay the other
       requests, and the new request also waits for earlier prompts. This time is divided by the number of
       steps of the new request: the mean length of recent answers or, if less, the request's token limit.
       If the worker lacks the request's LoRA adapter, the time to load the adapter counts in the same way.
    3. Tail: with `tail_power` above 1, both costs are multiplied by a factor above 1 if the worker's step
       would be slow compared with the median, or if its batch would be large compared with the mean.

    Since data-parallel ranks wait for each other in every step (see StepBarrier), the step, the requests, the
    active experts and the profile are taken from the whole replica. Within the replica the request goes to
    the rank where it adds the least time, or to the least loaded rank if it adds none at several.
    """

    name = "marginal-cost"
    reads_counts = True

    class Parameters(Policy.Parameters):
        affinity: Weight = Field(
            default=0.2,
            description="weight of a worker's affinity profile in its decode cost; 0: no profiles",
        )
        tail_power: float = Field(
            default=16.0,
            ge=1,
            le=32,
            description="exponent by which slow or full workers cost more; 1: they cost their time only",
        )
        adapter_load_s: Weight = Field(
            default=0.2,
            description="time in which an engine loads a LoRA adapter that it lacks, s; its requests wait",
        )
        cost: StepCost | None = Field(
            default=None, description="terms of the step cost, s; null: fitted to the engines' steps"
        )

    parameters: Parameters

    def __init__(self, **parameters: Any) -> None:
        super().__init__(**parameters)
        self._affinity = self.parameters.affinity
        self.cost = self.parameters.cost or StepCost()
        self.activation = ExpectedActivation()
        self.profiles = AffinityProfiles()
        self._barrier: StepBarrier | None = None
        self._profiled: dict[str, tuple[int, int]] = {}  # running request -> row, number there
        self._generated: dict[str, int] = {}  # generated tokens of each running request
        self._answer_tokens = _DEFAULT_ANSWER_TOKENS
        self._num_answers = 0  # number of answers in the mean, at most _ANSWER_TIME_CONSTANT

    def update_cost_model(self, cost: StepCost) -> None:
        if self.parameters.cost is None:
            self.cost = cost

    def on_workers_changed(self, workers: Sequence[str | None]) -> None:
        self._barrier = StepBarrier.from_workers(workers)

    def _rows(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the rows of these positions in `activation` and `profiles`; ranks of a replica share one."""
        return positions if self._barrier is None else self._barrier.first_positions[positions]

    def select(self, request: PlacementRequest, loads: Loads, rng: np.random.Generator) -> Decision:
        positions = available_workers(loads)
        estimate = self._estimate(request)
        if estimate is None:
            return choose_shortest(positions, loads, "no-counts")
        self.activation.grow(len(loads))
        self.profiles.grow(len(loads), len(estimate.activation))
        candidates = positions
        if self._barrier is not None:
            costs = self._raw_costs(positions, loads, request, np.zeros(len(positions), np.float32))
            total = self._total_cost(costs, costs.references())
            candidates = self._barrier.least_loaded_ranks(positions, loads, self.cost, total)
        references = None
        if len(positions) > _MAX_EXACT_WORKERS and len(candidates) > _FINALISTS:
            num_cells = self.activation.num_coarse_cells
            cost, references = self._weighted_cost(candidates, loads, estimate, num_cells)
            candidates = candidates[np.argpartition(cost, _FINALISTS)[:_FINALISTS]]
        cost, _ = self._weighted_cost(candidates, loads, estimate, len(estimate.activation), references)
        return Decision(
            int(candidates[cost.argmin()]),
            num_candidates=len(positions),
            reason=self.name,
            policy_data=estimate,
        )

    def added_cost(self, request: PlacementRequest, loads: Loads) -> NDArray[np.float64]:
        """Return the cost of the request at each worker, float64[W]; zeros if no counts are known.

        With a tail power of 1 the cost is the time that the request adds to a step, summed over all requests
        of the worker and itself, s. The time of its uncached prompt is divided by the steps of its answer.
        """
        levels = self.activation.estimate_levels(request)
        if levels is None:
            return np.zeros(len(loads))
        self.activation.grow(len(loads))
        positions = np.arange(len(loads))
        added_experts = self.activation.p_idle[: len(loads)] @ activation_of(levels)
        costs = self._raw_costs(positions, loads, request, added_experts[self._rows(positions)])
        return self._total_cost(costs, costs.references())

    def _raw_costs(
        self,
        positions: NDArray[np.int64],
        loads: Loads,
        request: PlacementRequest,
        added_experts: NDArray[np.float32],
    ) -> WorkerCosts:
        """Return the costs at each worker.

        Args:
            added_experts: float32[n], active experts that the request adds at each worker.
        """
        requests, kv_tokens = loads.in_flight[positions], loads.kv_tokens[positions]
        active, tokens = self.activation.expected_active[self._rows(positions)], request.prompt_tokens
        more: dict[str, Any] = {"more_tokens": tokens, "more_experts": added_experts}
        if self._barrier is None:
            decode, step_s = self.cost.added_seconds(requests, kv_tokens, active, **more)
        else:
            requests = self._barrier.reduce_over_ranks(np.add, loads.in_flight)[positions]
            decode, step_s = self._barrier.added_seconds(self.cost, positions, loads, active, **more)
        uncached = np.full(len(positions), 0 if request.blocks is None else tokens)  # None: prefilled already
        if loads.cached_tokens is not None:
            uncached = np.maximum(uncached - loads.cached_tokens[positions], 0)
        pending = np.zeros_like(uncached) if loads.prefill_tokens is None else loads.prefill_tokens[positions]
        steps = min(self._answer_tokens, request.max_new_tokens or self._answer_tokens)
        per_token_s = self.cost.per_prompt_token_s / steps
        prefill = ((requests + 1) * uncached + pending) * per_token_s
        if loads.lacks_adapter is not None:
            load_s = self.parameters.adapter_load_s * loads.lacks_adapter[positions]
            prefill += (requests + 1) * load_s / steps
        batch = requests.astype(np.float64) + 1
        return WorkerCosts(decode, prefill, step_s + (uncached + pending) * per_token_s, batch)

    def _total_cost(
        self, costs: WorkerCosts, references: References, affinity: NDArray[np.float64] | float = 1.0
    ) -> NDArray[np.float64]:
        """Return the cost at each worker, float64[n].

        Args:
            affinity: float64[n], factor of the decode cost.
        """
        factor = costs.tail_factor(self.parameters.tail_power, references)
        total: NDArray[np.float64] = costs.decode * factor * affinity + costs.prefill * factor
        return total

    def _weighted_cost(
        self,
        positions: NDArray[np.int64],
        loads: Loads,
        estimate: RequestEstimate,
        num_cells: int,
        references: References | None = None,
    ) -> tuple[NDArray[np.float64], References]:
        """Return the cost at each worker, weighted by affinity, from the first `num_cells` of each row.

        Args:
            references: the references of all candidates; None: `positions` are all candidates.

        Returns:
            (float64[n], the references).
        """
        rows = self._rows(positions)
        added_experts = _dot_products(self.activation.p_idle, rows, estimate.activation, num_cells)
        costs, similarity = self._raw_costs(positions, loads, estimate.request, added_experts), np.zeros(1)
        if estimate.deviation is not None:
            similarity = self.profiles.cosine(
                rows, _dot_products(self.profiles.vectors, rows, estimate.deviation, num_cells)
            )
        references = references or costs.references(float(similarity.max()))
        # The reference was estimated from fewer cells, so the similarity of a finalist may exceed it.
        affinity = 1 + self._affinity * np.maximum(references.similarity - similarity, 0)
        return self._total_cost(costs, references, affinity), references

    def _estimate(self, request: PlacementRequest) -> RequestEstimate | None:
        levels = self.activation.estimate_levels(request)
        if levels is None:
            return None
        activation, mean, deviation = activation_of(levels), self.activation.mean, None
        if self._affinity and mean is not None and self.activation.has_usable_counts(request):
            deviation = deviation_of(activation, mean)
        return RequestEstimate(request, levels, activation, deviation)

    def on_assigned(self, request: PlacementRequest, position: int, decision: Decision | None = None) -> None:
        data = decision.policy_data if decision is not None else None
        estimate: RequestEstimate | None = data if data is not None else self._estimate(request)
        row = position if self._barrier is None else int(self._barrier.first_positions[position])
        if estimate is not None and estimate.deviation is not None:
            self._learn(request.request_id, row, estimate.deviation)
        self.activation.on_assigned(request, row, estimate.levels if estimate is not None else None)

    def _learn(self, request_id: str, row: int, deviation: NDArray[np.float32]) -> None:
        """Learn a request once; true counts that replace predicted ones correct the profile."""
        if request_id not in self._profiled:
            self._profiled[request_id] = (row, self.profiles.learn(row, deviation))
            return
        _, levels = self.activation.running[request_id]
        assert self.activation.mean is not None
        before = deviation_of(activation_of(levels), self.activation.mean)
        if before is not None:
            self.profiles.correct(*self._profiled[request_id], deviation - before)

    def on_progress(self, generated_tokens: Mapping[str, int]) -> None:
        running = self.activation.running
        self._generated.update((name, n) for name, n in generated_tokens.items() if name in running)

    def on_aborted(self, request_id: str) -> None:
        self._generated.pop(request_id, None)  # this is not the length of an answer
        super().on_aborted(request_id)

    def on_finished(self, request_id: str) -> None:
        self.activation.on_finished(request_id)
        self._profiled.pop(request_id, None)
        tokens = self._generated.pop(request_id, 0)
        if tokens:
            self._num_answers = min(self._num_answers + 1, _ANSWER_TIME_CONSTANT)
            self._answer_tokens += (tokens - self._answer_tokens) / self._num_answers


def _dot_products(
    matrix: NDArray[np.float32], rows: NDArray[np.int64], vector: NDArray[np.float32], num_cells: int
) -> NDArray[np.float32]:
    """Estimate matrix[rows] @ vector, float32[n], from the first `num_cells` columns."""
    selects_first = 2 * len(rows) < len(matrix)
    products = (matrix[rows] if selects_first else matrix)[:, :num_cells] @ vector[:num_cells]
    if not selects_first:
        products = products[rows]
    scaled: NDArray[np.float32] = products * np.float32(len(vector) / num_cells)
    return scaled
