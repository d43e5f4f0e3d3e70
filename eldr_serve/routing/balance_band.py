"""Balance of KV first, expert locality within what balance leaves open."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eldr_serve.routing.activation import ExpectedActivation, probability
from eldr_serve.routing.balance import BalanceRouteHorizon
from eldr_serve.routing.policies import in_range
from eldr_serve.routing.types import Handoff, PolicyError, WorkerLoad


class BalanceBand(BalanceRouteHorizon):
    """Of the pairs of a waiting request and a free worker whose F is within a band of the best, the one
    whose experts are most at home there.

    ELDR's band turned round: it balances among like workers, this looks for the like among balanced
    placements. Of a batch that is full anyway, the choice is which request comes next; so what counts is
    the experts that a request adds here beyond those that it would add at the worker that suits it best.

    Where no waiting request has expert counts it is balance-route-horizon.

    Parameters beyond `slots`, `patience` and those of balance-route-horizon from `alpha` on:
        reach: longest-waiting requests that are compared, 1 or more.
        band_tokens: F below the best one that is as good, as tokens admitted; 0 or more.
    """

    name = "balance-band"
    reads_counts = True

    def __init__(
        self,
        *,
        slots: int = 64,
        reach: int = 128,
        patience: int = 512,
        band_tokens: float = 1500.0,
        alpha: float = 48.0,
        beta: float = 1.0,
        gamma: float = 0.9,
        horizon: int = 20,
        predictor: str = "survival",
        refresh: int = 10,
        gate: float = 0.5,
    ) -> None:
        super().__init__(
            slots=slots,
            reach=reach,
            patience=patience,
            alpha=alpha,
            beta=beta,
            gamma=gamma,
            horizon=horizon,
            predictor=predictor,
            refresh=refresh,
            gate=gate,
        )
        if not in_range(band_tokens, 0.0, float("inf")):
            raise PolicyError(f"band_tokens is {band_tokens!r}, it must be 0 or more")
        self._band_tokens = band_tokens
        self._active = ExpectedActivation()
        self._p: dict[str, NDArray[np.float32]] = {}  # of those that wait

    @property
    def parameters(self) -> dict[str, Any]:
        known = type(self).__init__.__kwdefaults__ or {}
        return {k: v for k, v in super().parameters.items() if k in known} | {
            "band_tokens": self._band_tokens
        }

    def placed(self, handoff: Handoff, worker: int) -> None:
        super().placed(handoff, worker)
        self._active.placed(handoff, worker, self._active.levels(handoff))

    def released(self, request_id: str) -> None:
        super().released(request_id)
        self._active.released(request_id)

    def _fill(
        self,
        waiting: Sequence[Handoff],
        loads: Sequence[WorkerLoad],
        workers: list[int],
        free: NDArray[np.int64],
        overdue: list[int],
    ) -> list[tuple[int, int]]:
        others = sorted(set(range(len(waiting))).difference(overdue))
        reachable = [*overdue, *others][: len(overdue) + self._reach + int(free.sum()) - 1]
        p = self._probabilities(waiting, reachable)
        if p is None:
            return super()._fill(waiting, loads, workers, free, overdue)
        held = self._project(loads)[workers]
        self._active.grow(len(loads))
        idle = self._active.idle[workers]
        added = idle @ p.T  # experts that each request would add to each worker, [W, n]
        newcomers = self._newcomers([waiting[i] for i in reachable])
        band = self._band_tokens * self._discounted.gain
        given: list[tuple[int, int]] = []
        first, rest = np.split(np.arange(len(reachable)), [len(overdue)])
        for columns in (first, rest):
            while len(columns) and free.any():
                head, rows = columns[: self._reach], np.flatnonzero(free)
                margins = held.max(axis=0) - held[rows]
                score = self._discounted(newcomers.added[head], margins[:, None])
                excess = (added[:, head] - added[:, head].min(axis=0))[rows]
                excess[score < score.max() - band] = np.inf
                row, position = np.unravel_index(int(excess.argmin()), excess.shape)
                worker, column = int(rows[row]), int(head[position])
                free[worker] -= 1
                held[worker] += newcomers.grown[column]
                idle[worker] *= 1 - p[column]
                added[worker] = idle[worker] @ p.T
                columns = columns[columns != column]
                given.append((reachable[column], worker))
        return given

    def _probabilities(self, waiting: Sequence[Handoff], chosen: list[int]) -> NDArray[np.float32] | None:
        """float32[n, L*E], zeros where nothing is known of a request; None if of no request."""
        known: dict[str, NDArray[np.float32]] = {}
        for i in chosen:
            name = waiting[i].request_id
            p = self._p.get(name)
            if p is None and (levels := self._active.levels(waiting[i])) is not None:
                p = probability(levels)
            if p is not None:
                known[name] = p
        self._p = known
        if not known:
            return None
        nothing = np.zeros_like(next(iter(known.values())))
        return np.stack([known.get(waiting[i].request_id, nothing) for i in chosen])
