"""Baseline policies, which place requests by load or by chance."""

from __future__ import annotations

import numpy as np

from eldr_serve.scheduling.policies.base import Policy, available_workers, choose_shortest
from eldr_serve.scheduling.types import Decision, Loads, PlacementRequest


class Random(Policy):
    """Chooses a worker at random, each with the same probability."""

    name = "random"
    is_balancer = True

    def select(self, request: PlacementRequest, loads: Loads, rng: np.random.Generator) -> Decision:
        positions = available_workers(loads)
        return Decision(
            int(positions[rng.integers(len(positions))]), num_candidates=len(positions), reason=self.name
        )


class RoundRobin(Policy):
    """Chooses the workers in turn."""

    name = "round-robin"
    is_balancer = True

    def __init__(self) -> None:
        super().__init__()
        self._last = -1

    def select(self, request: PlacementRequest, loads: Loads, rng: np.random.Generator) -> Decision:
        positions = available_workers(loads)
        later = positions[positions > self._last]
        self._last = int(later[0] if len(later) else positions[0])
        return Decision(self._last, num_candidates=len(positions), reason=self.name)


class ShortestQueue(Policy):
    """Chooses the worker with the fewest requests in flight."""

    name = "shortest-queue"
    is_balancer = True

    def select(self, request: PlacementRequest, loads: Loads, rng: np.random.Generator) -> Decision:
        return choose_shortest(available_workers(loads), loads, self.name)


class PowerOfTwo(Policy):
    """Chooses the less loaded of two random workers."""

    name = "power-of-two"
    is_balancer = True

    def select(self, request: PlacementRequest, loads: Loads, rng: np.random.Generator) -> Decision:
        positions = available_workers(loads)
        pair = rng.choice(len(positions), size=min(2, len(positions)), replace=False)
        return choose_shortest(positions[np.sort(pair)], loads, self.name)


class LeastTokens(Policy):
    """Chooses the worker whose requests in flight have the fewest KV tokens (prompt + generated)."""

    name = "least-tokens"
    is_balancer = True

    def select(self, request: PlacementRequest, loads: Loads, rng: np.random.Generator) -> Decision:
        positions = available_workers(loads)
        tokens = loads.kv_tokens[positions]
        position = choose_shortest(positions[tokens == tokens.min()], loads, self.name).position
        return Decision(position, num_candidates=len(positions), reason=self.name)
