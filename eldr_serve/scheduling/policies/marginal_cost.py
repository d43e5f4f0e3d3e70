"""Placement by the marginal cost of decode and, on whole replicas, of prefill, without calibration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from eldr_serve.scheduling.activation import ExpectedActivation, Levels, probability
from eldr_serve.scheduling.cost import StepCost
from eldr_serve.scheduling.parameters import Weight
from eldr_serve.scheduling.policies.base import Policy, available_workers, choose_shortest
from eldr_serve.scheduling.profiles import AffinityProfiles, deviation_of
from eldr_serve.scheduling.types import Decision, Loads, PlacementRequest

# Above _MAX_EXACT_WORKERS workers, finalists are selected by every eighth layer, then compared exactly.
_MAX_EXACT_WORKERS = 512
_FINALISTS = 32
_DEFAULT_ANSWER_TOKENS = 128.0  # mean length of answers until one has ended
_ANSWER_MEMORY = 64  # time constant of the mean length, answers
# Multiples of the median step time and of the mean batch; above them a tail power raises the cost. Step times
# are estimated too low if answers use other experts than their prompts, so alone they let some batches grow.
_SLOW_STEP = 1.05
_LARGE_BATCH = 1.5


class RequestEstimate(NamedTuple):
    """The estimated expert activation of a request to place."""

    request: PlacementRequest
    levels: Levels
    p: NDArray[np.float32]
    deviation: NDArray[np.float32] | None  # None if the request has no counts or affinity is 0


class MarginalCost(Policy):
    """The worker where the request adds the least time, summed over all requests.

    docs/policies.md has the formulas. The cost of a worker, in seconds per step, consists of:

    1. Decode: the time of the request's step, and the time that the request adds to the step of each other
       request there. The active experts of a batch are expected from the counts of its requests' prefills.
       Affinity profiles change this cost, so that workers specialise online (see AffinityProfiles).
    2. Prefill, only on whole replicas: prompt tokens that the worker's prefix cache lacks delay the other
       requests, and the new request also waits for earlier prompts. This time is divided by the number of
       steps of the new request: the mean length of recent answers or, if less, the request's token limit.
       The time in which a worker loads the request's LoRA adapter, if it lacks it, counts in the same way.
    3. Tail: with `tail_power` above 1, both costs are multiplied by a factor above 1 if the worker's step
       would be slow compared with the median, or its batch large compared with the mean.
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
        self.active = ExpectedActivation()
        self.profiles = AffinityProfiles()
        self._profiled: dict[str, tuple[int, int]] = {}  # running request -> position, number there
        self._generated: dict[str, int] = {}  # generated tokens of each running request
        self._answer_tokens = _DEFAULT_ANSWER_TOKENS
        self._num_answers = 0  # number of answers in the mean, at most _ANSWER_MEMORY

    def update_cost_model(self, cost: StepCost) -> None:
        if self.parameters.cost is None:
            self.cost = cost

    def select(self, request: PlacementRequest, loads: Loads, rng: np.random.Generator) -> Decision:
        workers = available_workers(loads)
        estimate = self._estimate(request)
        if estimate is None:
            return choose_shortest(workers, loads, "no-counts")
        self.active.grow(len(loads))
        self.profiles.grow(len(loads), len(estimate.p))
        candidates = workers
        if len(workers) > _MAX_EXACT_WORKERS:
            cost = self._weighted_cost(candidates, loads, estimate, self.active.coarse_cells)
            candidates = candidates[np.argpartition(cost, _FINALISTS)[:_FINALISTS]]
        cost = self._weighted_cost(candidates, loads, estimate, len(estimate.p))
        return Decision(
            int(candidates[cost.argmin()]),
            num_candidates=len(workers),
            reason=self.name,
            policy_data=estimate,
        )

    def added_cost(self, request: PlacementRequest, loads: Loads) -> NDArray[np.float64]:
        """Return the cost of the request at each worker, float64[W]; zeros if no counts are known.

        With a tail power of 1 the cost is the time that the request adds to a step, summed over all requests
        of the worker and itself, s. The time of its uncached prompt is divided by the steps of its answer.
        """
        levels = self.active.levels(request)
        if levels is None:
            return np.zeros(len(loads))
        self.active.grow(len(loads))
        added_experts = self.active.idle[: len(loads)] @ probability(levels)
        decode, prefill = self._raw_costs(np.arange(len(loads)), loads, request, added_experts)
        return decode + prefill

    def _raw_costs(
        self,
        workers: NDArray[np.int64],
        loads: Loads,
        request: PlacementRequest,
        added_experts: NDArray[np.float32],
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return the costs of decode and of prefill at each worker without affinity, float64[n] each.

        Args:
            added_experts: float32[n], active experts that the request adds at each worker.
        """
        requests, kv_tokens = loads.in_flight[workers], loads.kv_tokens[workers]
        active, tokens = self.active.union[workers], request.prompt_tokens
        decode, step_s = self.cost.added_seconds(
            requests, kv_tokens, active, more_tokens=tokens, more_experts=added_experts
        )
        uncached = np.full(len(workers), tokens)
        if loads.cached_tokens is not None:
            uncached = np.maximum(uncached - loads.cached_tokens[workers], 0)
        pending = np.zeros_like(uncached) if loads.prefill_tokens is None else loads.prefill_tokens[workers]
        steps = min(self._answer_tokens, request.max_new_tokens or self._answer_tokens)
        per_token_s = self.cost.per_prompt_token_s / steps
        prefill = ((requests + 1) * uncached + pending) * per_token_s
        if loads.lacks_adapter is not None:
            load_s = self.parameters.adapter_load_s * loads.lacks_adapter[workers]
            prefill += (requests + 1) * load_s / steps
        if self.parameters.tail_power == 1:
            return decode, prefill
        total_s = step_s + (uncached + pending) * per_token_s
        step_excess = total_s / (_SLOW_STEP * np.median(total_s) or 1.0)  # the median is 0 without costs
        batch_excess = (requests + 1) / (_LARGE_BATCH * (requests.mean() + 1))
        factor = np.maximum(np.maximum(step_excess, batch_excess), 1) ** (self.parameters.tail_power - 1)
        return decode * factor, prefill * factor

    def _weighted_cost(
        self, workers: NDArray[np.int64], loads: Loads, estimate: RequestEstimate, cells: int
    ) -> NDArray[np.float64]:
        """Return the cost at each worker, weighted by affinity, from the first `cells` of each row."""
        added_experts = _dot_products(self.active.idle, workers, estimate.p, cells)
        decode, prefill = self._raw_costs(workers, loads, estimate.request, added_experts)
        if estimate.deviation is not None:
            similarity = self.profiles.cosine(
                workers, _dot_products(self.profiles.profile, workers, estimate.deviation, cells)
            )
            decode *= 1 + self._affinity * (similarity.max() - similarity)
        return decode + prefill

    def _estimate(self, request: PlacementRequest) -> RequestEstimate | None:
        levels = self.active.levels(request)
        if levels is None:
            return None
        p, mean, deviation = probability(levels), self.active.mean, None
        if self._affinity and mean is not None and self.active.has_usable_counts(request):
            deviation = deviation_of(p, mean)
        return RequestEstimate(request, levels, p, deviation)

    def on_assigned(self, request: PlacementRequest, position: int, decision: Decision | None = None) -> None:
        data = decision.policy_data if decision is not None else None
        estimate: RequestEstimate | None = data if data is not None else self._estimate(request)
        if estimate is not None and estimate.deviation is not None:
            self._learn(request.request_id, position, estimate.deviation)
        self.active.on_assigned(request, position, estimate.levels if estimate is not None else None)

    def _learn(self, request_id: str, position: int, deviation: NDArray[np.float32]) -> None:
        """Learn a request once; true counts that replace predicted ones correct the profile."""
        if request_id not in self._profiled:
            self._profiled[request_id] = (position, self.profiles.learn(position, deviation))
            return
        _, levels = self.active.running[request_id]
        assert self.active.mean is not None
        before = deviation_of(probability(levels), self.active.mean)
        if before is not None:
            self.profiles.correct(*self._profiled[request_id], deviation - before)

    def on_progress(self, generated_tokens: Mapping[str, int]) -> None:
        running = self.active.running
        self._generated.update((name, n) for name, n in generated_tokens.items() if name in running)

    def on_finished(self, request_id: str) -> None:
        self.active.on_finished(request_id)
        self._profiled.pop(request_id, None)
        tokens = self._generated.pop(request_id, 0)
        if tokens:
            self._num_answers = min(self._num_answers + 1, _ANSWER_MEMORY)
            self._answer_tokens += (tokens - self._answer_tokens) / self._num_answers


def _dot_products(
    rows: NDArray[np.float32], workers: NDArray[np.int64], vector: NDArray[np.float32], cells: int
) -> NDArray[np.float32]:
    """Estimate rows[workers] @ vector, float32[n], from the first `cells` columns."""
    selects_first = 2 * len(workers) < len(rows)
    products = (rows[workers] if selects_first else rows)[:, :cells] @ vector[:cells]
    if not selects_first:
        products = products[workers]
    scaled: NDArray[np.float32] = products * np.float32(len(vector) / cells)
    return scaled
