"""Policies by load, by chance or by the request's domain."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import numpy as np

from eldr_serve.scheduling.policies.base import Policy, available, shortest
from eldr_serve.scheduling.types import Decision, Loads, PlacementRequest


class Random(Policy):
    """A uniformly random worker."""

    name = "random"

    def select(self, request: PlacementRequest, loads: Loads, rng: np.random.Generator) -> Decision:
        workers = available(loads)
        return Decision(
            int(workers[rng.integers(len(workers))]), num_candidates=len(workers), reason=self.name
        )


class RoundRobin(Policy):
    """The workers in turn."""

    name = "round-robin"

    def __init__(self) -> None:
        super().__init__()
        self._last = -1

    def select(self, request: PlacementRequest, loads: Loads, rng: np.random.Generator) -> Decision:
        workers = available(loads)
        later = workers[workers > self._last]
        self._last = int(later[0] if len(later) else workers[0])
        return Decision(self._last, num_candidates=len(workers), reason=self.name)


class ShortestQueue(Policy):
    """The worker with the fewest requests in flight."""

    name = "shortest-queue"

    def select(self, request: PlacementRequest, loads: Loads, rng: np.random.Generator) -> Decision:
        return shortest(available(loads), loads, self.name)


class PowerOfTwo(Policy):
    """The less loaded of two random workers."""

    name = "power-of-two"

    def select(self, request: PlacementRequest, loads: Loads, rng: np.random.Generator) -> Decision:
        workers = available(loads)
        drawn = rng.choice(len(workers), size=min(2, len(workers)), replace=False)
        return shortest(workers[np.sort(drawn)], loads, self.name)


class LeastTokens(Policy):
    """The worker with the fewest KV tokens (prompt + generated) of requests in flight."""

    name = "least-tokens"

    def select(self, request: PlacementRequest, loads: Loads, rng: np.random.Generator) -> Decision:
        workers = available(loads)
        tokens = loads.kv_tokens[workers]
        worker = shortest(workers[tokens == tokens.min()], loads, self.name).worker
        return Decision(worker, num_candidates=len(workers), reason=self.name)


class Domain(Policy):
    """The least loaded worker whose cluster's main domain is the request's.

    Without a table, or if no cluster has this main domain, the hash of its name selects a worker.
    """

    name = "domain"

    def select(self, request: PlacementRequest, loads: Loads, rng: np.random.Generator) -> Decision:
        workers = available(loads)
        if request.domain is None:
            return shortest(workers, loads, "no-domain")
        domains = self.table.domains if self.table is not None else []
        own = [w for w in workers.tolist() if request.domain in _served(domains, w, len(loads))]
        if own:
            return shortest(np.array(own), loads, self.name)
        worker = int(workers[zlib.crc32(request.domain.encode()) % len(workers)])
        return Decision(worker, reason="domain-hash")


def _served(domains: Sequence[str], worker: int, num_workers: int) -> Sequence[str]:
    if len(domains) >= num_workers:
        return domains[worker::num_workers]
    return [domains[worker % len(domains)]] if domains else []
