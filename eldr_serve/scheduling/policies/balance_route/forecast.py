"""Projection of the workers' loads over the horizon, from running requests and a predictor of their ends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from eldr_serve.scheduling.policies.balance_route.running_requests import FinishedRequest, RunningRequests
from eldr_serve.scheduling.policies.length_predictors import (
    GuardedLengthPredictor,
    LengthPredictor,
    length_predictor_class,
)
from eldr_serve.scheduling.types import Loads, PlacementRequest


class Forecast:
    """The running requests, and each worker's load projected H steps ahead (paper, section C).

    Args:
        horizon: H, decode steps.
        predictor: name for length_predictor_class.
        refresh: R, generated tokens between predictions for a request.
        gate: minimum p at which a prediction is used; below it, the request is expected to run for H.
        count_down: see RunningRequests.
    """

    def __init__(
        self, horizon: int, predictor: str, refresh: int, gate: float, *, count_down: bool = False
    ) -> None:
        self.horizon = horizon
        self._refresh = refresh
        self._gate = gate
        self._running = RunningRequests(horizon, count_down=count_down)
        # Requests that have ended since the last prediction; they may be placed again.
        self._finished: dict[str, FinishedRequest] = {}
        self._guard = GuardedLengthPredictor(length_predictor_class(predictor)(horizon), horizon)

    @property
    def length_predictor(self) -> LengthPredictor:
        return self._guard.predictor

    @length_predictor.setter
    def length_predictor(self, predictor: LengthPredictor) -> None:
        self._guard = GuardedLengthPredictor(predictor, self.horizon)

    @property
    def predictor_failures(self) -> int:
        return self._guard.failures

    def on_assigned(self, request: PlacementRequest, position: int) -> None:
        finished = self._running.remove(request.request_id) or self._finished.pop(request.request_id, None)
        self._running.add(
            request.request_id,
            position,
            request.prompt_tokens,
            max_new_tokens=request.max_new_tokens,
            key=request.prompt_key,
            age=finished.generated_tokens if finished is not None else 0,
        )

    def on_finished(self, request_id: str) -> None:
        finished = self._running.remove(request_id)
        if finished is not None:
            self._finished[request_id] = finished

    def on_aborted(self, request_id: str) -> None:
        """Process the end of a request whose answer is not complete; its length is not learnt."""
        aborted = self._running.remove(request_id)
        if aborted is not None:
            self._finished[request_id] = replace(aborted, is_complete=False)

    def on_progress(self, generated_tokens: Mapping[str, int]) -> None:
        self._running.set_generated_tokens(generated_tokens)
        self._predict()

    def project(self, loads: Loads) -> NDArray[np.float64]:
        """Return the projected KV tokens of each worker, float64[W, H+1]; at h = 0 they equal `loads`.

        Loads of unknown requests are assumed to remain and to grow.
        """
        self._predict()
        projected, requests = self._running.project(len(loads))
        unknown = np.maximum(loads.in_flight - requests, 0)
        projected += (loads.kv_tokens - projected[:, 0])[:, None]
        projected += unknown[:, None] * np.arange(self.horizon + 1)
        return np.maximum(projected, 0.0, out=projected)

    def expected_steps(self, waiting: Sequence[PlacementRequest]) -> NDArray[np.int64]:
        """Return the expected decode steps of requests that are not yet placed, int64[n], at most H."""
        by_request = self._guard.keyed_by_request
        keys = [request.request_id if by_request else request.prompt_key for request in waiting]
        tokens = np.array([request.prompt_tokens for request in waiting], np.int64)
        limits = np.array([request.max_new_tokens or self.horizon for request in waiting])
        expected = self._expected_tokens(np.zeros(len(waiting), np.int64), keys, tokens)
        steps = np.clip(np.minimum(np.rint(expected), limits), 1, self.horizon)
        return np.asarray(steps, np.int64)

    def _expected_tokens(
        self, ages: NDArray[np.int64], keys: list[str | None], prompt_tokens: NDArray[np.int64]
    ) -> NDArray[np.float64]:
        """Return r of each request, float64[n]: p * mu + (1 - p) * H if p reaches the gate, else H."""
        horizon = self.horizon
        p, mu = self._guard.predict(ages, keys, prompt_tokens)
        expected = p * np.minimum(mu, horizon) + (1 - p) * horizon
        return np.where(p >= self._gate, expected, horizon)

    def _predict(self) -> None:
        """Learn from finished requests, and predict again for requests that are due."""
        running, by_request = self._running, self._guard.keyed_by_request
        for request, finished in self._finished.items():
            if finished.is_complete and finished.generated_tokens:  # without tokens it never ran
                key = request if by_request else finished.key
                self._guard.learn(key, finished.prompt_tokens, finished.generated_tokens)
        self._finished.clear()
        rows = running.stale_rows(self._refresh)
        if not len(rows):
            return
        names = running.ids if by_request else running.keys
        keys = [names[row] for row in rows.tolist()]
        remaining = self._expected_tokens(running.age[rows], keys, running.prompt_tokens[rows])
        running.set_remaining(rows, remaining)
