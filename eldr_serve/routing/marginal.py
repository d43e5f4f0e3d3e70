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
_UNIT = _DEEPEST / 255**2
_SQUARES = np.arange(256, dtype=np.int32) ** 2
_ACTIVE = -np.expm1(-_UNIT * _SQUARES).astype(np.float32)  # level -> p


class MarginalCost(Policy):
    """The worker where the request adds the least decode time for everybody.

    A request activates expert e of layer l in a step with probability p[l,e], estimated by its
    prefill counts / prompt tokens. Worker w's batch leaves the expert idle with probability
    prod(1 - p), so it is expected to activate U experts, and with the newcomer U + sum(idle * p).
    With step cost T the newcomer adds (b+1) T(b+1, U') - b T(b, U) to the b requests there and itself.

    Parameters:
        prior_tokens: the mean of recent requests counts as so many tokens beside the prompt's own;
            short prompts say little.
        cost: a StepCost's terms in s, or None to start with defaults and follow the engines' steps.
    """

    name = "marginal-cost"
    reads_counts = True

    def __init__(self, *, prior_tokens: float = 8.0, cost: dict[str, float] | None = None) -> None:
        super().__init__()
        if not in_range(prior_tokens, 0.0, 1e6):
            raise PolicyError(f"prior_tokens is {prior_tokens!r}, it must be 0 or more")
        if cost is not None and (
            not isinstance(cost, dict)
            or set(cost) - set(TERMS)
            or not all(in_range(v, 0.0, 1e6) for v in cost.values())
        ):
            raise PolicyError(f"cost is {cost!r}, it must map {', '.join(TERMS)} to seconds, 0 or more")
        self._prior_tokens = prior_tokens
        self._fixed = cost
        self.cost = StepCost(**(cost or {}))
        self._shape: tuple[int, ...] = ()
        self._prior: NDArray[np.float32] | None = None  # [L*E]
        self._held: dict[str, tuple[int, NDArray[np.uint8]]] = {}  # id -> worker, levels
        self._depth = np.zeros((0, 0), np.int32)  # [W, L*E], sum of squared levels
        self._idle = np.ones((0, 0), np.float32)  # [W, L*E]
        self._union = np.zeros(0)  # [W], expected active experts

    @property
    def parameters(self) -> dict[str, Any]:
        return {"prior_tokens": self._prior_tokens, "cost": self._fixed}

    def follow_cost(self, cost: StepCost) -> None:
        if self._fixed is None:
            self.cost = cost

    def choose(self, handoff: Handoff, loads: Sequence[WorkerLoad], rng: np.random.Generator) -> Decision:
        workers = available(loads)
        levels = self._levels(handoff)
        if levels is None:
            return shortest(workers, loads, "no-signature")
        self._grow(len(loads))
        p = _ACTIVE[levels]
        idle = self._idle[: len(loads)]
        added = idle @ p
        batch = np.array([load.in_flight for load in loads], np.float64)
        kv_tokens = np.array([load.kv_tokens for load in loads], np.float64)
        now = self.cost.seconds(batch, kv_tokens, self._union[: len(loads)])
        with_it = self.cost.seconds(
            batch + 1, kv_tokens + handoff.prompt_tokens, self._union[: len(loads)] + added
        )
        marginal = (batch + 1) * with_it - batch * now
        if len(workers) < len(loads):
            marginal = np.where([load.available for load in loads], marginal, np.inf)
        return Decision(int(marginal.argmin()), len(workers), None, self.name)

    def placed(self, handoff: Handoff, worker: int) -> None:
        self.released(handoff.request_id)
        levels = self._levels(handoff)
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
            p = counts.reshape(-1).astype(np.float32)
            if prior is not None:
                p += self._prior_tokens * prior
                p /= handoff.prompt_tokens + self._prior_tokens
            else:
                p /= handoff.prompt_tokens
        elif prior is not None:
            p = prior
        else:
            return None
        depth = -np.log1p(-np.minimum(p, 1 - np.exp(-_DEEPEST)))
        levels: NDArray[np.uint8] = np.rint(np.sqrt(depth / _UNIT)).astype(np.uint8)
        return levels

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
        np.exp(-_UNIT * self._depth[worker], out=self._idle[worker], casting="same_kind")
        self._union[worker] = self._idle.shape[1] - self._idle[worker].sum(dtype=np.float64)
