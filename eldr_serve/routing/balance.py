"""BalanceRoute: decode workers whose KV tokens stay alike, now (BR-0) and over some steps (BR-H).

Workers that meet at a barrier in every decode step go at the pace of the one with the most KV tokens.
Both rules of the paper and the locality band with BR-H's score in place of in-flight counts.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eldr_serve.routing.dispatch import Newcomers, Slots, dispatch
from eldr_serve.routing.fscore import MAX_WINDOW, FScore
from eldr_serve.routing.lookahead import Lookahead
from eldr_serve.routing.policies import LocalityBand, Policy, PooledPolicy, available, in_range
from eldr_serve.routing.predictors import PREDICTORS, Predictor
from eldr_serve.routing.types import Decision, Loads, PlacementRequest, PolicyError

_MOST = 2**31 - 1  # of any count: sums of them stay within int64


class BalanceRoute(PooledPolicy):
    """BR-0: fill the workers' margins to the heaviest one, by present KV tokens (paper, section 3).

    Requests wait in a pool until a worker has a free slot. While slots abound, the worker with the
    most takes the request with the largest F; then workers, by free slots and margin, take the best
    set of the requests that have waited longest. A free slot is never left while a request waits.

    Parameters:
        slots: requests that a worker runs at once, 1 or more; the engines' batch limit.
        window: longest-waiting requests whose subsets are compared, 1 to 12.
        reach: longest-waiting requests of which one is taken where a worker has a single slot to give,
            1 or more; wider packs better and lets more overtake.
        threshold: free slots of all workers together, up to which sets are compared; None is one a
            worker.
        patience: admissions of later arrivals that a request in the pool lets pass; then it goes before
            all that are not overdue.
        pool: False sends each request at once to the worker with the largest F (section D.6).
        overcommit: requests beyond its slots that a worker may hold where there is no pool.
    """

    name = "balance-route"

    def __init__(
        self,
        *,
        slots: int = 64,
        window: int = 10,
        reach: int = 64,
        threshold: int | None = None,
        patience: int = 256,
        pool: bool = True,
        overcommit: int = 4,
    ) -> None:
        super().__init__()
        _check_count("slots", slots, 1)
        _check_count("window", window, 1, MAX_WINDOW)
        _check_count("reach", reach, 1)
        if threshold is not None:
            _check_count("threshold", threshold, 0)
        _check_count("patience", patience, 1)
        _check_count("overcommit", overcommit, 0)
        if not isinstance(pool, bool):
            raise PolicyError(f"pool is {pool!r}, it must be true or false")
        self._slots = slots
        self._window = window
        self._reach = reach
        self._threshold = threshold
        self._patience = patience
        self._pool = pool
        self._overcommit = overcommit
        self._overtaken: dict[str, int] = {}  # waiting request -> later arrivals admitted before it

    @property
    def parameters(self) -> dict[str, Any]:
        return {
            "slots": self._slots,
            "window": self._window,
            "reach": self._reach,
            "threshold": self._threshold,
            "patience": self._patience,
            "pool": self._pool,
            "overcommit": self._overcommit,
        }

    @property
    def pooled(self) -> bool:
        return self._pool

    def _score(self, num_workers: int) -> FScore:
        return FScore.present(num_workers)

    def _project(self, loads: Loads) -> NDArray[np.float64]:
        """KV tokens of each worker, float64[W, H+1]."""
        return loads.kv_tokens[:, None].astype(np.float64)

    def _newcomers(self, waiting: Sequence[PlacementRequest]) -> Newcomers:
        return Newcomers(prompt_tokens(waiting), np.zeros(len(waiting), np.int64), 0)

    def _choose(self, request: PlacementRequest, loads: Loads, rng: np.random.Generator) -> Decision:
        workers = available(loads)
        open_to_it = workers
        if not self._pool:
            most = self._slots + self._overcommit
            below = workers[loads.in_flight[workers] < most]
            open_to_it = below if len(below) else workers
        worker = _best_worker(open_to_it, request, loads, self._score(len(workers)), self._project(loads))
        return Decision(worker, len(open_to_it), None, self.name)

    def _dispatch(
        self, waiting: Sequence[PlacementRequest], loads: Loads, rng: np.random.Generator
    ) -> list[tuple[int, Decision]]:
        workers = loads.workers
        free = np.maximum(self._slots - loads.in_flight[workers], 0)
        if not waiting or not free.any():
            return []
        overtaken = self._overtaken_by_index(waiting)
        overdue = [index for index, times in overtaken.items() if times >= self._patience]
        # A pool may be deep, but what lies further back cannot be reached now.
        others = (index for index in range(len(waiting)) if overtaken.get(index, 0) < self._patience)
        reachable = overdue + list(islice(others, max(self._reach, self._window) + int(free.sum())))
        requests = [waiting[index] for index in reachable]
        given = [
            (reachable[column], row)
            for column, row in self._fill(requests, len(overdue), loads, workers, free)
        ]
        admitted = sorted(index for index, _ in given)
        for index in range(admitted[-1]):
            overtaken[index] = overtaken.get(index, 0) + len(admitted) - bisect_right(admitted, index)
        for index in admitted:
            overtaken.pop(index, None)
        self._overtaken = {waiting[index].request_id: times for index, times in overtaken.items()}
        return [(index, Decision(int(workers[row]), len(workers), None, self.name)) for index, row in given]

    def _overtaken_by_index(self, waiting: Sequence[PlacementRequest]) -> dict[int, int]:
        """How often each waiting request was overtaken, where it was; ascending."""
        found: dict[int, int] = {}
        for index, request in enumerate(waiting):
            if len(found) == len(self._overtaken):
                break
            if times := self._overtaken.get(request.request_id):
                found[index] = times
        return found

    def _fill(
        self,
        waiting: Sequence[PlacementRequest],
        overdue: int,
        loads: Loads,
        workers: NDArray[np.int64],
        free: NDArray[np.int64],
    ) -> list[tuple[int, int]]:
        """(index into `waiting`, index into `workers`) of those placed; `free` slots are used up.

        Args:
            waiting: those that can be reached; the first so many are overdue and go before the others.
        """
        return dispatch(
            self._newcomers(waiting),
            Slots(free, self._project(loads)[workers]),
            self._score(len(workers)),
            threshold=len(workers) if self._threshold is None else self._threshold,
            window=self._window,
            reach=self._reach,
            overdue=overdue,
        )


class _LooksAhead(Policy):
    """What the policies with a horizon have in common: their score, and the running requests."""

    def __init__(
        self,
        *,
        alpha: float,
        beta: float,
        gamma: float,
        horizon: int,
        predictor: str,
        refresh: int,
        gate: float,
        **others: Any,
    ) -> None:
        super().__init__(**others)
        if not in_range(alpha, 0.0, 1e6):
            raise PolicyError(f"alpha is {alpha!r}, it must be 0 or more")
        if not in_range(beta, 1e-6, 1e6):
            raise PolicyError(f"beta is {beta!r}, it must be above 0")
        if not in_range(gamma, 1e-6, 1.0):
            raise PolicyError(f"gamma is {gamma!r}, it must be above 0 and at most 1")
        _check_count("horizon", horizon, 1, 1000)
        if not isinstance(predictor, str) or predictor not in PREDICTORS:
            raise PolicyError(f"predictor is {predictor!r}, it must be one of {', '.join(PREDICTORS)}")
        _check_count("refresh", refresh, 1)
        if not in_range(gate, 0.0, 1.0):
            raise PolicyError(f"gate is {gate!r}, it must be a probability, 0 to 1")
        self._horizon = {
            "alpha": alpha,
            "beta": beta,
            "gamma": gamma,
            "horizon": horizon,
            "predictor": predictor,
            "refresh": refresh,
            "gate": gate,
        }
        self._discounted = FScore.discounted(horizon, gamma, alpha, beta)
        self._lookahead = Lookahead(horizon, predictor, refresh, gate)

    @property
    def parameters(self) -> dict[str, Any]:
        return super().parameters | self._horizon

    @property
    def predictor(self) -> Predictor:
        """Says which requests end soon; may be set to any object of the protocol."""
        return self._lookahead.predictor

    @predictor.setter
    def predictor(self, predictor: Predictor) -> None:
        self._lookahead.predictor = predictor

    @property
    def predictor_failures(self) -> int:
        return self._lookahead.predictor_failures

    def on_assigned(self, request: PlacementRequest, worker: int, decision: Decision | None = None) -> None:
        self._lookahead.on_assigned(request, worker)

    def on_finished(self, request_id: str) -> None:
        self._lookahead.on_finished(request_id)

    def on_progress(self, generated_tokens: Mapping[str, int]) -> None:
        self._lookahead.on_progress(generated_tokens)


class BalanceRouteHorizon(_LooksAhead, BalanceRoute):
    """BR-H: the same over the next steps, as far as a predictor sees requests end (paper, section 4).

    Parameters beyond those of balance-route:
        alpha: cost of a token that overflows a margin, in tokens; 0 or more.
        beta: gain of a token admitted; above 0.
        gamma: discount of each step ahead, above 0 up to 1.
        horizon: H, decode steps looked ahead, 1 to 1000.
        predictor: "survival" (past output lengths), "prompt-keyed" (those of equal prompts) or
            "boosted-trees" (scikit-learn, fitted anew every 256 ended requests).
        refresh: tokens that a request generates between predictions.
        gate: probability of ending within the horizon from which a prediction is taken, 0 to 1.

    The attribute `predictor` takes any object of the Predictor protocol, for instance
    `Oracle({request id: output tokens})` in a simulation.
    """

    name = "balance-route-horizon"

    def __init__(
        self,
        *,
        slots: int = 64,
        window: int = 10,
        reach: int = 64,
        threshold: int | None = None,
        patience: int = 256,
        pool: bool = True,
        overcommit: int = 4,
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
            window=window,
            reach=reach,
            threshold=threshold,
            patience=patience,
            pool=pool,
            overcommit=overcommit,
            alpha=alpha,
            beta=beta,
            gamma=gamma,
            horizon=horizon,
            predictor=predictor,
            refresh=refresh,
            gate=gate,
        )

    def _score(self, num_workers: int) -> FScore:
        return self._discounted

    def _project(self, loads: Loads) -> NDArray[np.float64]:
        return self._lookahead.project(loads)

    def _newcomers(self, waiting: Sequence[PlacementRequest]) -> Newcomers:
        return Newcomers(prompt_tokens(waiting), self._lookahead.stays(waiting), self._lookahead.horizon)


class LocalityBalance(_LooksAhead, LocalityBand):
    """Within the locality band, the worker with the largest horizon F-score; each request at once.

    Without a signature or a table, the largest F of all workers.

    Parameters: `band` and `max_load_ratio` of locality-band (the ratio is of requests in flight), and
    `alpha`, `beta`, `gamma`, `horizon`, `predictor`, `refresh`, `gate` of balance-route-horizon.
    """

    name = "locality-balance"

    def __init__(
        self,
        *,
        band: float | None = None,
        max_load_ratio: float | None = None,
        alpha: float = 48.0,
        beta: float = 1.0,
        gamma: float = 0.9,
        horizon: int = 20,
        predictor: str = "survival",
        refresh: int = 10,
        gate: float = 0.5,
    ) -> None:
        super().__init__(
            band=band,
            max_load_ratio=max_load_ratio,
            alpha=alpha,
            beta=beta,
            gamma=gamma,
            horizon=horizon,
            predictor=predictor,
            refresh=refresh,
            gate=gate,
        )

    def _lightest(
        self,
        candidates: NDArray[np.int64],
        request: PlacementRequest,
        loads: Loads,
        reason: str,
        similarity: NDArray[np.float64] | None = None,
    ) -> Decision:
        worker = _best_worker(
            candidates, request, loads, self._discounted, self._lookahead.project(loads), similarity
        )
        like = None if similarity is None else float(similarity[worker])
        return Decision(worker, len(candidates), like, reason)


def _best_worker(
    candidates: NDArray[np.int64],
    request: PlacementRequest,
    loads: Loads,
    score: FScore,
    projected: NDArray[np.float64],
    similarity: NDArray[np.float64] | None = None,
) -> int:
    """The candidate with the largest F for the request.

    Wherever the request is safe F is the same; the most similar of those is taken, where that is
    known, and then the one with the largest least margin.

    Args:
        projected: KV tokens of all workers, float64[W, H+1].
    """
    envelope = projected[available(loads)].max(axis=0)
    margins = envelope - projected[candidates]
    value = score(np.full((1, margins.shape[1]), request.prompt_tokens), margins)
    like = np.zeros(len(candidates)) if similarity is None else similarity[candidates]
    order = np.lexsort((loads.in_flight[candidates], -margins.min(axis=1), -like, -value))
    return int(candidates[order[0]])


def prompt_tokens(waiting: Sequence[PlacementRequest]) -> NDArray[np.float64]:
    """float64[n]."""
    return np.array([request.prompt_tokens for request in waiting], np.float64)


def _check_count(name: str, value: Any, low: int, high: int = _MOST) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise PolicyError(f"{name} is {value!r}, it must be a whole number from {low} to {high}")
