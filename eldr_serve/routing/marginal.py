"""Placement by marginal decode cost: no clusters, no calibration, no refit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eldr_serve.routing.activation import ExpectedActivation, Levels, probability
from eldr_serve.routing.cost import TERMS, StepCost
from eldr_serve.routing.policies import Policy, available, in_range, shortest, worker_similarity
from eldr_serve.routing.types import Decision, Handoff, Loads, PolicyError, WorkerLoad

# Above _MANY workers, every eighth layer alone picks the finalists, which are then weighed in full.
_MANY = 512
_FINALISTS = 32


class MarginalCost(Policy):
    """The worker where the request adds the least decode time for everybody.

    A request activates expert e of layer l in a step with probability p[l,e], estimated by its
    prefill counts / prompt tokens. Worker w's batch leaves the expert idle with probability
    prod(1 - p), so it is expected to activate U experts, and with the newcomer U + sum(idle * p).
    With step cost T the newcomer adds (b+1) T(b+1, U') - b T(b, U) to the b requests there and itself.

    Parameters:
        prior_tokens: the mean of recent requests counts as so many tokens beside the prompt's own;
            short prompts say little.
        expert_weight: an active expert counts as so many. Above 1 the rule looks beyond the requests
            that are there: a worker that keeps to its experts draws more of the same kind.
        home: where a table is live, a worker whose centroid is by d (cosine) less like the request than
            the nearest one costs 1 + home * d times as much. Above 0 workers specialise further: lower
            medians, higher tails. Without a table it has no effect.
        cost: a StepCost's terms in s, or None to start with defaults and follow the engines' steps.
    """

    name = "marginal-cost"
    reads_counts = True

    def __init__(
        self,
        *,
        prior_tokens: float = 0.0,
        expert_weight: float = 1.0,
        home: float = 0.0,
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
        self._asked: tuple[Handoff, Levels] | None = None  # by choose, for placed

    @property
    def parameters(self) -> dict[str, Any]:
        return {
            "prior_tokens": self._prior_tokens,
            "expert_weight": self._expert_weight,
            "home": self._home,
            "cost": self._fixed,
        }

    def follow_cost(self, cost: StepCost) -> None:
        if self._fixed is None:
            self.cost = cost

    def _choose(self, handoff: Handoff, loads: Loads, rng: np.random.Generator) -> Decision:
        workers = available(loads)
        levels = self.active.levels(handoff)
        if levels is None:
            return shortest(workers, loads, "no-signature")
        self._asked = (handoff, levels)
        self.active.grow(len(loads))
        idle, p = self.active.idle, probability(levels)
        candidates, charge = workers, self._charge(handoff, len(loads))
        if len(workers) > _MANY:
            coarse = self.active.coarse_cells
            added = idle[: len(loads), :coarse] @ p[:coarse] * (len(p) / coarse)
            marginal = self._marginal(candidates, loads, added[candidates], handoff.prompt_tokens)
            marginal *= charge[candidates]
            candidates = candidates[np.argpartition(marginal, _FINALISTS)[:_FINALISTS]]
        added = (idle if len(candidates) == len(idle) else idle[candidates]) @ p
        marginal = self._marginal(candidates, loads, added, handoff.prompt_tokens)
        marginal *= charge[candidates]
        return Decision(int(candidates[marginal.argmin()]), len(workers), None, self.name)

    def added_cost(self, handoff: Handoff, loads: Loads | Sequence[WorkerLoad]) -> NDArray[np.float64]:
        """Seconds a step, over all its requests, that each worker would lose by the newcomer; float64[W].

        Zeros where nothing is known of the request.
        """
        levels = self.active.levels(handoff)
        if levels is None:
            return np.zeros(len(loads))
        self.active.grow(len(loads))
        added = self.active.idle[: len(loads)] @ probability(levels)
        return self._marginal(np.arange(len(loads)), Loads.of(loads), added, handoff.prompt_tokens)

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

    def _charge(self, handoff: Handoff, num_workers: int) -> NDArray[np.float64]:
        """float64[W], what each worker's cost is multiplied by for being another's home; 1 or more."""
        similarity = handoff.similarity
        if not self._home or similarity is None or not len(similarity) or not np.isfinite(similarity).all():
            return np.ones(num_workers)
        own = worker_similarity(similarity, num_workers).astype(np.float64)
        charged: NDArray[np.float64] = 1 + self._home * (own.max() - own)
        return charged

    def placed(self, handoff: Handoff, worker: int) -> None:
        asked, self._asked = self._asked, None  # what is learnt below may change the levels of others
        levels = asked[1] if asked is not None and asked[0] is handoff else self.active.levels(handoff)
        self.active.placed(handoff, worker, levels)

    def released(self, request_id: str) -> None:
        self.active.released(request_id)
