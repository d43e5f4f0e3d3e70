"""Baselines that send a prompt to the worker with its prefix, unless that worker is overloaded."""

from __future__ import annotations

import numpy as np
from pydantic import Field

from eldr_serve.queues.prefill_replica_choice import choose_prefill_replica
from eldr_serve.scheduling import Decision, Loads, PlacementRequest, Policy
from eldr_serve.scheduling.policies.base import available_workers, choose_shortest


class _LoadLimitedPolicy(Policy):
    """Base class of policies that limit a worker's load."""

    class Parameters(Policy.Parameters):
        max_load_ratio: float = Field(
            default=1.25, ge=1, description="highest load of a worker, in mean loads"
        )

    parameters: Parameters


class SessionHash(_LoadLimitedPolicy):
    """Chooses a worker by a hash of the session's key, or the least loaded one without key or room."""

    name = "session-hash"

    def select(self, request: PlacementRequest, loads: Loads, rng: np.random.Generator) -> Decision:
        positions = available_workers(loads)
        if not request.prompt_key:
            return choose_shortest(positions, loads, self.name)
        in_flight = {str(worker): int(loads.in_flight[worker]) for worker in positions}
        ratio = self.parameters.max_load_ratio
        chosen = choose_prefill_replica(request.prompt_key.encode(), in_flight, max_load_ratio=ratio)
        return Decision(int(chosen), num_candidates=len(positions), reason=self.name)


class LongestPrefix(_LoadLimitedPolicy):
    """Chooses the worker that caches most of the prompt, among those that are not overloaded."""

    name = "longest-prefix"

    def select(self, request: PlacementRequest, loads: Loads, rng: np.random.Generator) -> Decision:
        positions = available_workers(loads)
        in_flight = loads.in_flight[positions]
        max_in_flight = max(1.0, self.parameters.max_load_ratio * (in_flight.sum() + 1) / len(positions))
        positions = positions[(in_flight + 1 <= max_in_flight) | (in_flight == in_flight.min())]
        if loads.cached_tokens is not None:
            cached = loads.cached_tokens[positions]
            positions = positions[cached == cached.max()]
        return choose_shortest(positions, loads, self.name)
