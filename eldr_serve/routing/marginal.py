"""Placement by marginal decode cost: no clusters, no calibration, no refit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eldr_serve.routing.cost import TERMS, StepCost
from eldr_serve.routing.policies import Policy, available, in_range, shortest
from eldr_serve.routing.types import Decision, Handoff, PolicyError, WorkerLoad

# -log(1 - p) is kept as one byte a cell: level i stands for _DEEPEST * (i / 255)**2, fine where p is small.
_DEEPEST = 4.0  # p = 0.98; an expert that is all but always active costs nothing more anyway
UNIT = _DEEPEST / 255**2
_SQUARES = np.arange(256, dtype=np.int32) ** 2
# Above _MANY workers, every _COARSE-th layer alone picks the finalists, which are then weighed in full.
_MANY = 512
_FINALISTS = 32
_COARSE = 8
_ACTIVE = -np.expm1(-UNIT * _SQUARES).astype(np.float32)  # level -> p


def levels_of(p: NDArray[np.floating[Any]]) -> NDArray[np.uint8]:
    """The level nearest to each probability; level i stands for 1 - exp(-UNIT * i**2)."""
    depth = -np.log1p(-np.minimum(p, 1 - np.exp(-_DEEPEST)))
    levels: NDArray[np.uint8] = np.rint(np.sqrt(depth / UNIT)).astype(np.uint8)
    return levels


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
        cost: a StepCost's terms in s, or None to start with defaults and follow the engines' steps.
    """

    name = "marginal-cost"
    reads_counts = True

    def __init__(
        self,
        *,
        prior_tokens: float = 0.0,
        expert_weight: float = 1.0,
        cost: dict[str, float] | None = None,
    ) -> None:
        super().__init__()
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
        self._fixed = cost
        self.cost = StepCost(**(cost or {}))
        self._shape: tuple[int, ...] = ()
        self._layers = np.zeros(0, np.int64)  # cells are kept in this order of layers
        self._coarse_cells = 0  # cells of every _COARSE-th layer, which come first
        self._prior: NDArray[np.float32] | None = None  # [L*E]
        self._asked: tuple[Handoff, NDArray[np.uint8]] | None = None  # by choose, for placed
        self._held: dict[str, tuple[int, NDArray[np.uint8]]] = {}  # id -> worker, levels
        self._depth = np.zeros((0, 0), np.int32)  # [W, L*E], sum of squared levels
        self._idle = np.ones((0, 0), np.float32)  # [W, L*E]
        self._union = np.zeros(0)  # [W], expected active experts

    @property
    def parameters(self) -> dict[str, Any]:
        return {
            "prior_tokens": self._prior_tokens,
            "expert_weight": self._expert_weight,
            "cost": self._fixed,
        }

    def follow_cost(self, cost: StepCost) -> None:
        if self._fixed is None:
            self.cost = cost

    def choose(self, handoff: Handoff, loads: Sequence[WorkerLoad], rng: np.random.Generator) -> Decision:
        workers = available(loads)
        levels = self._levels(handoff)
        if levels is None:
            return shortest(workers, loads, "no-signature")
        self._asked = (handoff, levels)
        self._grow(len(loads))
        p = _ACTIVE[levels]
        candidates = np.array(workers)
        if len(workers) > _MANY:
            coarse = self._coarse_cells
            added = self._idle[: len(loads), :coarse] @ p[:coarse] * (len(p) / coarse)
            marginal = self._marginal(candidates, loads, added[candidates], handoff.prompt_tokens)
            candidates = candidates[np.argpartition(marginal, _FINALISTS)[:_FINALISTS]]
        added = (self._idle if len(candidates) == len(self._idle) else self._idle[candidates]) @ p
        marginal = self._marginal(candidates, loads, added, handoff.prompt_tokens)
        return Decision(int(candidates[marginal.argmin()]), len(workers), None, self.name)

    def added_cost(self, handoff: Handoff, loads: Sequence[WorkerLoad]) -> NDArray[np.float64]:
        """Seconds a step, over all its requests, that each worker would lose by the newcomer; float64[W].

        Zeros where nothing is known of the request.
        """
        levels = self._levels(handoff)
        if levels is None:
            return np.zeros(len(loads))
        self._grow(len(loads))
        added = self._idle[: len(loads)] @ _ACTIVE[levels]
        return self._marginal(np.arange(len(loads)), loads, added, handoff.prompt_tokens)

    def _marginal(
        self, workers: NDArray[np.int64], loads: Sequence[WorkerLoad], added: NDArray[np.float32], tokens: int
    ) -> NDArray[np.float64]:
        """Seconds that each of `workers` would lose a step, over all its requests, by the newcomer."""
        batch = np.array([loads[w].in_flight for w in workers], np.float64)
        kv_tokens = np.array([loads[w].kv_tokens for w in workers], np.float64)
        union = self._expert_weight * self._union[workers]
        now = self.cost.seconds(batch, kv_tokens, union)
        with_it = self.cost.seconds(batch + 1, kv_tokens + tokens, union + self._expert_weight * added)
        return np.asarray((batch + 1) * with_it - batch * now)

    def placed(self, handoff: Handoff, worker: int) -> None:
        self.released(handoff.request_id)
        asked, self._asked = self._asked, None  # what is learnt below may change the levels of others
        levels = asked[1] if asked is not None and asked[0] is handoff else self._levels(handoff)
        if levels is None:
            return
        self._grow(worker + 1)
        self._held[handoff.request_id] = (worker, levels)
        self._depth[worker] += _SQUARES[levels]
        self._refresh(worker)
        if handoff.signature is not None:
            self._learn(_ACTIVE[levels])

    def released(self, request_id: str) -> None:
        worker, levels = self._held.pop(request_id, (-1, None))
        if levels is not None:
            self._depth[worker] -= _SQUARES[levels]
            self._refresh(worker)

    def _levels(self, handoff: Handoff) -> NDArray[np.uint8] | None:
        """uint8[L*E]; the prior's where the request has no usable counts; None without either."""
        prior = self._prior
        counts = handoff.signature
        usable = (
            counts is not None
            and counts.ndim == 2
            and handoff.prompt_tokens > 0
            and self._shape in ((), counts.shape)
        )
        if usable:
            assert counts is not None
            if not self._shape:
                self._shape = counts.shape
                order = np.arange(len(counts))
                self._layers = np.concatenate([order[start::_COARSE] for start in range(_COARSE)])
                self._coarse_cells = len(order[::_COARSE]) * counts.shape[1]
            p = counts[self._layers].reshape(-1).astype(np.float32)
            if prior is not None:
                p += self._prior_tokens * prior
                p /= handoff.prompt_tokens + self._prior_tokens
            else:
                p /= handoff.prompt_tokens
        elif prior is not None:
            p = prior
        else:
            return None
        return levels_of(p)

    def _learn(self, p: NDArray[np.float32]) -> None:
        if self._prior is None:
            self._prior = p.copy()
        else:
            self._prior += (p - self._prior) / np.float32(64)

    def _grow(self, workers: int) -> None:
        have, cells = len(self._depth), int(np.prod(self._shape))
        if workers > have:
            more = workers - have
            self._depth = np.vstack([self._depth.reshape(have, cells), np.zeros((more, cells), np.int32)])
            self._idle = np.vstack([self._idle.reshape(have, cells), np.ones((more, cells), np.float32)])
            self._union = np.append(self._union, np.zeros(more))

    def _refresh(self, worker: int) -> None:
        np.exp(-UNIT * self._depth[worker], out=self._idle[worker], casting="same_kind")
        self._union[worker] = self._idle.shape[1] - self._idle[worker].sum(dtype=np.float64)
