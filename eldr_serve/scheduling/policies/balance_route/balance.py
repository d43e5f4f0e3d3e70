"""BalanceRoute, which balances decode workers by KV tokens, now (BR-0) and over the next steps (BR-H).

Workers with a barrier in every decode step are as slow as the one with the most KV tokens.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, field_validator

from eldr_serve.scheduling.parameters import MAX_COUNT, Count, Weight
from eldr_serve.scheduling.policies.balance_route.dispatch import FreeSlots, WaitingTokens, dispatch
from eldr_serve.scheduling.policies.balance_route.forecast import Forecast
from eldr_serve.scheduling.policies.balance_route.fscore import MAX_CANDIDATES, FScore
from eldr_serve.scheduling.policies.base import QueuedPolicy, available_workers
from eldr_serve.scheduling.policies.length_predictors import LengthPredictor, length_predictor_class
from eldr_serve.scheduling.types import Decision, Loads, PlacementRequest

Overtakes = Annotated[
    Count,
    Field(description="later arrivals that may overtake a waiting request before it goes first"),
]


class BalanceRoute(QueuedPolicy):
    """BR-0, which balances the workers by their current KV tokens (paper, section 3).

    A worker's margin is how many fewer KV tokens it has than the fullest worker. F is the gain of a
    placement (see FScore). Requests wait in the decode queue until a worker has a free slot. While many slots
    are free, the worker with the most free slots takes the request with the largest F. Then workers, ordered
    by free slots and margin, take the best set of the longest-waiting requests. No slot stays free while a
    request waits.
    """

    name = "balance-route"

    class Parameters(QueuedPolicy.Parameters):
        slots: Count = Field(
            default=64,
            description="requests that a worker runs at once: **set it to the engines' `max_num_seqs`**",
        )
        candidates: int = Field(
            default=10,
            ge=1,
            le=MAX_CANDIDATES,
            description="longest-waiting requests whose sets are compared",
        )
        lookahead: int | None = Field(
            default=64,
            ge=1,
            le=MAX_COUNT,
            description="longest-waiting requests compared for one slot: larger values pack better and let "
            "more requests overtake; null (the paper): all while sets are not compared, then `candidates`",
        )
        threshold: int | None = Field(
            default=None,
            ge=0,
            le=MAX_COUNT,
            description="maximum total of free slots at which sets are compared; null: one per worker",
        )
        max_overtakes: Overtakes = 256
        queue: bool = Field(
            default=True,
            description="false: place each request at once where F is largest (paper, section D.6)",
        )
        overcommit: int = Field(
            default=4,
            ge=0,
            le=MAX_COUNT,
            description="requests beyond its slots that a worker may hold without the queue",
        )

    parameters: Parameters

    def __init__(self, **parameters: Any) -> None:
        super().__init__(**parameters)
        self._overtaken: dict[str, int] = {}  # waiting request -> later arrivals admitted before it

    @property
    def has_queue(self) -> bool:
        return self.parameters.queue

    def _score(self, num_workers: int) -> FScore:
        return FScore.build_current(num_workers)

    def _project(self, loads: Loads) -> NDArray[np.float64]:
        """Return the projected KV tokens of each worker, float64[W, H+1]."""
        return loads.kv_tokens[:, None].astype(np.float64)

    def _project_waiting(self, waiting: Sequence[PlacementRequest]) -> WaitingTokens:
        return WaitingTokens(prompt_tokens(waiting), np.zeros(len(waiting), np.int64), 0)

    def select(self, request: PlacementRequest, loads: Loads, rng: np.random.Generator) -> Decision:
        positions = available_workers(loads)
        candidates = positions
        if not self.parameters.queue:
            max_in_flight = self.parameters.slots + self.parameters.overcommit
            below = positions[loads.in_flight[positions] < max_in_flight]
            candidates = below if len(below) else positions
        score, projected = self._score(len(positions)), self._project(loads)
        position = _best_position(candidates, request, loads, score, projected)
        return Decision(position, num_candidates=len(candidates), reason=self.name)

    def dispatch(
        self, waiting: Sequence[PlacementRequest], loads: Loads, rng: np.random.Generator
    ) -> list[tuple[int, Decision]]:
        p, positions = self.parameters, loads.available_positions
        free = np.maximum(p.slots - loads.in_flight[positions], 0)
        if not waiting or not free.any():
            return []
        overtaken = self._overtaken_by_index(waiting)
        overdue = [index for index, times in overtaken.items() if times >= p.max_overtakes]
        # Requests further back in a deep queue cannot be selected now.
        limit = None if p.lookahead is None else max(p.lookahead, p.candidates) + int(free.sum())
        punctual = (index for index in range(len(waiting)) if overtaken.get(index, 0) < p.max_overtakes)
        indices = overdue + list(islice(punctual, limit))
        requests = [waiting[index] for index in indices]
        pairs = self._fill(requests, len(overdue), loads, positions, free)
        assignments = [(indices[column], row) for column, row in pairs]
        admitted = sorted(index for index, _ in assignments)
        for index in range(admitted[-1]):
            overtaken[index] = overtaken.get(index, 0) + len(admitted) - bisect_right(admitted, index)
        self._overtaken |= {waiting[index].request_id: times for index, times in overtaken.items()}
        for index in admitted:
            self._overtaken.pop(waiting[index].request_id, None)
        return [
            (index, Decision(int(positions[row]), num_candidates=len(positions), reason=self.name))
            for index, row in assignments
        ]

    def on_finished(self, request_id: str) -> None:
        self._overtaken.pop(request_id, None)  # it was cancelled while it waited

    def _overtaken_by_index(self, waiting: Sequence[PlacementRequest]) -> dict[int, int]:
        """Return how often each overtaken request was overtaken, by ascending index."""
        overtaken: dict[int, int] = {}
        for index, request in enumerate(waiting):
            if len(overtaken) == len(self._overtaken):
                break
            if times := self._overtaken.get(request.request_id):
                overtaken[index] = times
        return overtaken

    def _fill(
        self,
        waiting: Sequence[PlacementRequest],
        overdue: int,
        loads: Loads,
        positions: NDArray[np.int64],
        free: NDArray[np.int64],
    ) -> list[tuple[int, int]]:
        """Place requests and return (index into `waiting`, index into `positions`); updates `free`.

        Args:
            waiting: requests that can be selected.
            overdue: number of leading requests that go before the others.
        """
        parameters = self.parameters
        return dispatch(
            self._project_waiting(waiting),
            FreeSlots(free, self._project(loads)[positions]),
            self._score(len(positions)),
            threshold=len(positions) if parameters.threshold is None else parameters.threshold,
            candidates=parameters.candidates,
            lookahead=parameters.lookahead,
            overdue=overdue,
        )


class BalanceRouteHorizon(BalanceRoute):
    """BR-H: BR-0 over the next H steps, with predicted ends of requests (paper, section 4).

    The attribute `length_predictor` accepts any object of the LengthPredictor protocol, for instance
    `Oracle({request id: output tokens})` in a simulation.
    """

    name = "balance-route-horizon"

    class Parameters(BalanceRoute.Parameters):
        alpha: Weight = Field(default=48.0, description="cost of a token that overflows a margin, tokens")
        beta: float = Field(default=1.0, ge=1e-6, le=1e6, description="gain of a token admitted, tokens")
        gamma: float = Field(default=0.9, ge=1e-6, le=1, description="discount of each step ahead")
        horizon: int = Field(
            default=20, ge=1, le=1000, description="decode steps over which loads are projected"
        )
        predictor: str = Field(
            default="survival",
            description="`survival`, `prompt-keyed`, `boosted-trees` or your own `module:Class`, created "
            "with the horizon",
        )
        refresh: Count = Field(default=10, description="generated tokens of a request between predictions")
        gate: float = Field(
            default=0.5,
            ge=0,
            le=1,
            description="minimum probability of an end within the horizon for using a prediction; below "
            "it the request is expected to outlast the horizon",
        )
        new_requests_end: bool = Field(
            default=True,
            description="false: F counts a waiting request at every step ahead, as in the paper; true: until "
            "its expected end. A request that is placed at once counts at every step",
        )
        count_down_from_horizon: bool = Field(
            default=False,
            description="true: a request that is expected to outlast the horizon counts down from it until "
            "its next prediction, as in the paper; false: it keeps the horizon",
        )

        @field_validator("predictor")
        @classmethod
        def _check_predictor(cls, predictor: str) -> str:
            length_predictor_class(predictor)
            return predictor

    parameters: Parameters

    def __init__(self, **parameters: Any) -> None:
        super().__init__(**parameters)
        checked = self.parameters
        self._horizon_score = FScore.build_horizon(
            checked.horizon, checked.gamma, checked.alpha, checked.beta
        )
        self._forecast = Forecast(
            checked.horizon,
            checked.predictor,
            checked.refresh,
            checked.gate,
            count_down=checked.count_down_from_horizon,
        )

    @property
    def length_predictor(self) -> LengthPredictor:
        """Return the predictor of the ends of requests; it may be set to any object of the protocol."""
        return self._forecast.length_predictor

    @length_predictor.setter
    def length_predictor(self, predictor: LengthPredictor) -> None:
        self._forecast.length_predictor = predictor

    @property
    def predictor_failures(self) -> int:
        return self._forecast.predictor_failures

    def on_assigned(self, request: PlacementRequest, position: int, decision: Decision | None = None) -> None:
        self._forecast.on_assigned(request, position)

    def on_finished(self, request_id: str) -> None:
        super().on_finished(request_id)
        self._forecast.on_finished(request_id)

    def on_aborted(self, request_id: str) -> None:
        self._forecast.on_aborted(request_id)
        super().on_aborted(request_id)

    def on_progress(self, generated_tokens: Mapping[str, int]) -> None:
        self._forecast.on_progress(generated_tokens)

    def _score(self, num_workers: int) -> FScore:
        return self._horizon_score

    def _project(self, loads: Loads) -> NDArray[np.float64]:
        return self._forecast.project(loads)

    def _project_waiting(self, waiting: Sequence[PlacementRequest]) -> WaitingTokens:
        steps, end = self._forecast.expected_steps(waiting), self.parameters.new_requests_end
        return WaitingTokens(prompt_tokens(waiting), steps, self._forecast.horizon, end=end)


def _best_position(
    candidates: NDArray[np.int64],
    request: PlacementRequest,
    loads: Loads,
    score: FScore,
    projected: NDArray[np.float64],
) -> int:
    """Return the position of the candidate with the largest F for the request.

    F is the same wherever the request fits; the largest minimum margin breaks such ties.

    Args:
        projected: projected KV tokens of all workers, float64[W, H+1].
    """
    envelope = projected[available_workers(loads)].max(axis=0)
    margins = envelope - projected[candidates]
    value = score(np.full((1, margins.shape[1]), request.prompt_tokens), margins)
    order = np.lexsort((loads.in_flight[candidates], -margins.min(axis=1), -value))
    return int(candidates[order[0]])


def prompt_tokens(waiting: Sequence[PlacementRequest]) -> NDArray[np.float64]:
    """Return the prompt tokens of each request, float64[n]."""
    return np.array([request.prompt_tokens for request in waiting], np.float64)
