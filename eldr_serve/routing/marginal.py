"""Placement by marginal cost, of decode and on whole replicas of prefill: no clusters, no calibration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from eldr_serve.routing.activation import ExpectedActivation, Levels, probability
from eldr_serve.routing.cost import StepCost
from eldr_serve.routing.parameters import Weight
from eldr_serve.routing.policies import Policy, available, shortest
from eldr_serve.routing.profiles import AffinityProfiles, deviation_of
from eldr_serve.routing.types import Decision, Loads, PlacementRequest

# Above _MANY workers, every eighth layer alone picks the finalists, which are then weighed in full.
_MANY = 512
_FINALISTS = 32
_USUAL_ANSWER = 128.0  # tokens, until answers have ended
_ANSWERS = 64  # in the mean length; what came before counts for a third


class Known(NamedTuple):
    """What is known of a request that may be placed."""

    request: PlacementRequest
    levels: Levels
    p: NDArray[np.float32]
    deviation: NDArray[np.float32] | None  # None: nothing of its own, or profiles do not count


class MarginalCost(Policy):
    """The worker where the request adds the least time for everybody.

    A request activates expert e of layer l in a step with probability p[l,e], estimated by its
    prefill counts / prompt tokens. Worker w's batch leaves the expert idle with probability
    prod(1 - p), so it is expected to activate U experts, and with the newcomer U + sum(idle * p).
    With step cost T the newcomer adds (b+1) T(b+1, U') - b T(b, U) to the b requests there and itself.
    Affinity profiles let workers specialise online (see AffinityProfiles).

    A whole replica computes the newcomer's n prompt tokens that its prefix cache lacks, too, after the m
    tokens that it lacks of prompts that came before. Meanwhile its b requests wait, those of these prompts
    too, which answer by then. So once, each of them loses n per_prompt_token_s, and the newcomer waits for m
    + n tokens. The decode cost comes in each of the N steps that the newcomer stays. In seconds of all
    requests' time that is

        N [(b+1) T(b+1, U') - b T(b, U)] + [(b+1) n + m] per_prompt_token_s

    and workers are compared by the N-th part of it, seconds a step. N is the mean length of recent answers,
    or what the request allows where that is less. Where prefill has engines of its own,
    per_prompt_token_s is 0.
    """

    name = "marginal-cost"
    reads_counts = True

    class Parameters(Policy.Parameters):
        affinity: Weight = Field(
            default=0.2,
            description="a worker whose affinity profile is less like the request, by a cosine of d, than "
            "the most similar one's costs 1 + affinity x d times as much; 0 keeps none; much above 0.2 "
            "medians fall little further and tails rise",
        )
        cost: StepCost | None = Field(
            default=None, description="terms of a step's cost, s; null follows the engines' steps"
        )

    parameters: Parameters

    def __init__(self, **parameters: Any) -> None:
        super().__init__(**parameters)
        self._affinity = self.parameters.affinity
        self.cost = self.parameters.cost or StepCost()
        self.active = ExpectedActivation()
        self.profiles = AffinityProfiles()
        self._learnt: dict[str, tuple[int, int]] = {}  # running request -> worker, number in its profile
        self._generated: dict[str, int] = {}  # tokens of each running request
        self._answer_tokens = _USUAL_ANSWER
        self._answers = 0  # in that mean, _ANSWERS at most

    def update_cost_model(self, cost: StepCost) -> None:
        if self.parameters.cost is None:
            self.cost = cost

    def select(self, request: PlacementRequest, loads: Loads, rng: np.random.Generator) -> Decision:
        workers = available(loads)
        known = self._known(request)
        if known is None:
            return shortest(workers, loads, "no-signature")
        self.active.grow(len(loads))
        self.profiles.grow(len(loads), len(known.p))
        candidates = workers
        if len(workers) > _MANY:
            price = self._price(candidates, loads, known, self.active.coarse_cells)
            candidates = candidates[np.argpartition(price, _FINALISTS)[:_FINALISTS]]
        price = self._price(candidates, loads, known, len(known.p))
        return Decision(int(candidates[price.argmin()]), len(workers), None, self.name, known)

    def added_cost(self, request: PlacementRequest, loads: Loads) -> NDArray[np.float64]:
        """Seconds a step, over all its requests, that each worker would lose by the newcomer; float64[W].

        Zeros where nothing is known of the request.
        """
        levels = self.active.levels(request)
        if levels is None:
            return np.zeros(len(loads))
        self.active.grow(len(loads))
        added = self.active.idle[: len(loads)] @ probability(levels)
        everywhere = np.arange(len(loads))
        decode = self._marginal(everywhere, loads, added, request.prompt_tokens)
        return decode + self._prefill(everywhere, loads, request)

    def _prefill(
        self, workers: NDArray[np.int64], loads: Loads, request: PlacementRequest
    ) -> NDArray[np.float64]:
        """Seconds that prefill costs all requests of each of `workers`, a step that the newcomer stays."""
        lacking = np.full(len(workers), request.prompt_tokens)
        if loads.cached_tokens is not None:
            lacking = np.maximum(lacking - loads.cached_tokens[workers], 0)
        tokens = (loads.in_flight[workers] + 1) * lacking
        if loads.prefill_tokens is not None:
            tokens += loads.prefill_tokens[workers]
        steps = min(self._answer_tokens, request.max_new_tokens or self._answer_tokens)
        return np.asarray(tokens * (self.cost.per_prompt_token_s / steps))

    def _marginal(
        self, workers: NDArray[np.int64], loads: Loads, added: NDArray[np.float32], tokens: int
    ) -> NDArray[np.float64]:
        """Seconds that each of `workers` would lose a step, over all its requests, by the newcomer."""
        marginal = self.cost.added_seconds(
            loads.in_flight[workers],
            loads.kv_tokens[workers],
            self.active.union[workers],
            more_tokens=tokens,
            more_experts=added,
        )
        return np.asarray(marginal)

    def _price(
        self, workers: NDArray[np.int64], loads: Loads, known: Known, cells: int
    ) -> NDArray[np.float64]:
        """What each of `workers` loses, more where other profiles fit better; from the first `cells`."""
        added = _along(self.active.idle, workers, known.p, cells)
        price = self._marginal(workers, loads, added, known.request.prompt_tokens)
        if known.deviation is not None:
            similarity = self.profiles.cosine(
                workers, _along(self.profiles.profile, workers, known.deviation, cells)
            )
            price *= 1 + self._affinity * (similarity.max() - similarity)
        return price + self._prefill(workers, loads, known.request)

    def _known(self, request: PlacementRequest) -> Known | None:
        levels = self.active.levels(request)
        if levels is None:
            return None
        p, mean, deviation = probability(levels), self.active.mean, None
        if self._affinity and mean is not None and self.active.usable(request):
            deviation = deviation_of(p, mean)
        return Known(request, levels, p, deviation)

    def on_assigned(self, request: PlacementRequest, worker: int, decision: Decision | None = None) -> None:
        learnt = decision.learnt if decision is not None else None
        known: Known | None = learnt if learnt is not None else self._known(request)
        if known is not None and known.deviation is not None:
            self._learn(request.request_id, worker, known.deviation)
        self.active.on_assigned(request, worker, known.levels if known is not None else None)

    def _learn(self, request_id: str, worker: int, deviation: NDArray[np.float32]) -> None:
        """Each request once; one whose true counts take the place of predicted ones is corrected."""
        if request_id not in self._learnt:
            self._learnt[request_id] = (worker, self.profiles.learn(worker, deviation))
            return
        _, levels = self.active.held[request_id]
        assert self.active.mean is not None
        before = deviation_of(probability(levels), self.active.mean)
        if before is not None:
            self.profiles.correct(*self._learnt[request_id], deviation - before)

    def on_progress(self, generated_tokens: Mapping[str, int]) -> None:
        held = self.active.held
        self._generated.update((name, n) for name, n in generated_tokens.items() if name in held)

    def on_finished(self, request_id: str) -> None:
        self.active.on_finished(request_id)
        self._learnt.pop(request_id, None)
        tokens = self._generated.pop(request_id, 0)
        if tokens:
            self._answers = min(self._answers + 1, _ANSWERS)
            self._answer_tokens += (tokens - self._answer_tokens) / self._answers


def _along(
    rows: NDArray[np.float32], workers: NDArray[np.int64], vector: NDArray[np.float32], cells: int
) -> NDArray[np.float32]:
    """float32[n], rows[workers] @ vector, estimated from the first `cells` columns."""
    few = 2 * len(workers) < len(rows)
    found = (rows[workers] if few else rows)[:, :cells] @ vector[:cells]
    if not few:
        found = found[workers]
    scaled: NDArray[np.float32] = found * np.float32(len(vector) / cells)
    return scaled
