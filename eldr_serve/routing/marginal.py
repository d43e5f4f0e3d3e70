"""Placement by marginal decode cost: no clusters, no calibration, no refit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from eldr_serve.routing.activation import ExpectedActivation, Levels, probability
from eldr_serve.routing.cost import TERMS, StepCost
from eldr_serve.routing.homes import Homes, bent_of
from eldr_serve.routing.policies import Policy, available, in_range, shortest
from eldr_serve.routing.types import Decision, Loads, PlacementRequest, PolicyError, WorkerLoad

# Above _MANY workers, every eighth layer alone picks the finalists, which are then weighed in full.
_MANY = 512
_FINALISTS = 32


class Known(NamedTuple):
    """What is known of a request that may be placed."""

    request: PlacementRequest
    levels: Levels
    p: NDArray[np.float32]
    bent: NDArray[np.float32] | None  # None: nothing of its own, or homes do not count


class MarginalCost(Policy):
    """The worker where the request adds the least decode time for everybody.

    A request activates expert e of layer l in a step with probability p[l,e], estimated by its
    prefill counts / prompt tokens. Worker w's batch leaves the expert idle with probability
    prod(1 - p), so it is expected to activate U experts, and with the newcomer U + sum(idle * p).
    With step cost T the newcomer adds (b+1) T(b+1, U') - b T(b, U) to the b requests there and itself.
    What is to come it meets by keeping workers to their kind of request (see Homes).

    Parameters:
        prior_tokens: the mean of recent requests counts as so many tokens beside the prompt's own;
            short prompts say little.
        expert_weight: an active expert counts as so many.
        home: a worker whose home is by d (cosine) less like the request than the one most like it costs
            1 + home * d times as much. At 0 only the requests that are there count; much above 0.2
            medians fall little further and tails rise.
        cost: a StepCost's terms in s, or None to start with defaults and follow the engines' steps.
    """

    name = "marginal-cost"
    reads_counts = True

    def __init__(
        self,
        *,
        prior_tokens: float = 0.0,
        expert_weight: float = 1.0,
        home: float = 0.2,
        cost: dict[str, float] | None = None,
    ) -> None:
        super().__init__()
        if not in_range(home, 0.0, 1e6):
            raise PolicyError(f"home is {home!r}, it must be 0 or more")
        if not in_range(expert_weight, 0.0, 1e6):
            raise PolicyError(f"expert_weight is {expert_weight!r}, it must be 0 or more")
        if not in_range(prior_tokens, 0.0, 1e6):
            raise PolicyError(f"prior_tokens is {prior_tokens!r}, it must be 0 or more")
        if cost is not None and (
            not isinstance(cost, dict)
            or set(cost) - set(TERMS)
            or not all(in_range(v, 0.0, 1e6) for v in cost.values())
        ):
            raise PolicyError(f"cost is {cost!r}, it must map {', '.join(TERMS)} to seconds, 0 or more")
        self._prior_tokens = prior_tokens
        self._expert_weight = expert_weight
        self._home = home
        self._fixed = cost
        self.cost = StepCost(**(cost or {}))
        self.active = ExpectedActivation(prior_tokens)
        self.homes = Homes()

    @property
    def parameters(self) -> dict[str, Any]:
        return {
            "prior_tokens": self._prior_tokens,
            "expert_weight": self._expert_weight,
            "home": self._home,
            "cost": self._fixed,
        }

    def update_cost_model(self, cost: StepCost) -> None:
        if self._fixed is None:
            self.cost = cost

    def _choose(self, request: PlacementRequest, loads: Loads, rng: np.random.Generator) -> Decision:
        workers = available(loads)
        known = self._known(request)
        if known is None:
            return shortest(workers, loads, "no-signature")
        self.active.grow(len(loads))
        self.homes.grow(len(loads), len(known.p))
        candidates = workers
        if len(workers) > _MANY:
            price = self._price(candidates, loads, known, self.active.coarse_cells)
            candidates = candidates[np.argpartition(price, _FINALISTS)[:_FINALISTS]]
        price = self._price(candidates, loads, known, len(known.p))
        return Decision(int(candidates[price.argmin()]), len(workers), None, self.name, known)

    def added_cost(
        self, request: PlacementRequest, loads: Loads | Sequence[WorkerLoad]
    ) -> NDArray[np.float64]:
        """Seconds a step, over all its requests, that each worker would lose by the newcomer; float64[W].

        Zeros where nothing is known of the request.
        """
        levels = self.active.levels(request)
        if levels is None:
            return np.zeros(len(loads))
        self.active.grow(len(loads))
        added = self.active.idle[: len(loads)] @ probability(levels)
        return self._marginal(np.arange(len(loads)), Loads.of(loads), added, request.prompt_tokens)

    def _marginal(
        self, workers: NDArray[np.int64], loads: Loads, added: NDArray[np.float32], tokens: int
    ) -> NDArray[np.float64]:
        """Seconds that each of `workers` would lose a step, over all its requests, by the newcomer."""
        marginal = self.cost.added_seconds(
            loads.in_flight[workers],
            loads.kv_tokens[workers],
            self._expert_weight * self.active.union[workers],
            more_tokens=tokens,
            more_experts=self._expert_weight * added,
        )
        return np.asarray(marginal)

    def _price(
        self, workers: NDArray[np.int64], loads: Loads, known: Known, cells: int
    ) -> NDArray[np.float64]:
        """What each of `workers` loses, more where others are more at home; from the first `cells`."""
        added = _along(self.active.idle, workers, known.p, cells)
        price = self._marginal(workers, loads, added, known.request.prompt_tokens)
        if known.bent is not None:
            likeness = self.homes.cosine(workers, _along(self.homes.home, workers, known.bent, cells))
            price *= 1 + self._home * (likeness.max() - likeness)
        return price

    def _known(self, request: PlacementRequest) -> Known | None:
        levels = self.active.levels(request)
        if levels is None:
            return None
        p, mean, bent = probability(levels), self.active.mean, None
        if self._home and mean is not None and self.active.usable(request):
            bent = bent_of(p, mean)
        return Known(request, levels, p, bent)

    def on_assigned(self, request: PlacementRequest, worker: int, decision: Decision | None = None) -> None:
        learnt = decision.learnt if decision is not None else None
        known: Known | None = learnt if learnt is not None else self._known(request)
        if known is not None and known.bent is not None and request.request_id not in self.active.held:
            self.homes.learn(worker, known.bent)
        self.active.on_assigned(request, worker, known.levels if known is not None else None)

    def on_finished(self, request_id: str) -> None:
        self.active.on_finished(request_id)


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
