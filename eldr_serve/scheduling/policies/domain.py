"""ELDR's baseline Domain: placement by the domain that a request names."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
from pydantic import Field, field_validator

from eldr_serve.scheduling.policies.base import Policy, available_workers, choose_shortest
from eldr_serve.scheduling.types import Decision, Loads, PlacementRequest


class Domain(Policy):
    """Chooses the least loaded worker of the request's domain (ELDR, section 5).

    With a mix, the workers are divided among the domains in proportion to it, as in the paper. Without a mix,
    a worker belongs to the main domain of its cluster in the table. If the domain has no available worker,
    the hash of its name selects one.
    """

    name = "domain"

    class Parameters(Policy.Parameters):
        mix: dict[str, float] | None = Field(
            default=None,
            description="requests of each domain, in any unit, by which the workers are divided; null: by "
            "the clusters of the table",
        )

        @field_validator("mix")
        @classmethod
        def _check_mix(cls, mix: dict[str, float] | None) -> dict[str, float] | None:
            if mix is not None and (not mix or min(mix.values()) <= 0):
                raise ValueError("must have a domain, and only numbers above 0")
            return mix

    parameters: Parameters

    def __init__(self, **parameters: Any) -> None:
        super().__init__(**parameters)
        self._num_workers = 0  # number of workers that `_workers_by_domain` divides
        self._workers_by_domain: dict[str, range] = {}

    def select(self, request: PlacementRequest, loads: Loads, rng: np.random.Generator) -> Decision:
        positions = available_workers(loads)
        if request.domain is None:
            return choose_shortest(positions, loads, "no-domain")
        candidates = np.intersect1d(self._workers_of(request.domain, len(loads)), positions).astype(np.int64)
        if len(candidates):
            return choose_shortest(candidates, loads, self.name)
        position = int(positions[zlib.crc32(request.domain.encode()) % len(positions)])
        return Decision(position, reason="domain-hash")

    def _workers_of(self, domain: str, num_workers: int) -> Sequence[int]:
        """Return the positions of a domain's workers."""
        if self.parameters.mix is not None:
            if self._num_workers != num_workers:
                self._num_workers = num_workers
                self._workers_by_domain = divide_workers(self.parameters.mix, num_workers)
            return self._workers_by_domain.get(domain, ())
        domains = self.table.domains if self.table is not None else []
        return [n for n in range(num_workers) if domain in _domains_of(domains, n, num_workers)]


def divide_workers(mix: Mapping[str, float], num_workers: int) -> dict[str, range]:
    """Return each domain's block of positions: at least one, and the others in proportion to the mix.

    With fewer workers than domains, several domains share a worker.
    """
    names = sorted(mix, key=lambda name: (-mix[name], name))
    if num_workers < len(names):
        return {name: range(n % num_workers, n % num_workers + 1) for n, name in enumerate(names)}
    total, count = sum(mix.values()), dict.fromkeys(names, 1)
    for _ in range(num_workers - len(names)):
        count[max(names, key=lambda name: num_workers * mix[name] / total - count[name])] += 1
    ends = list(accumulate(count[name] for name in names))
    return {name: range(end - count[name], end) for name, end in zip(names, ends, strict=True)}


def _domains_of(domains: Sequence[str], position: int, num_workers: int) -> Sequence[str]:
    """Return the domains whose requests the worker at this position gets."""
    if len(domains) >= num_workers:
        return domains[position::num_workers]
    return [domains[position % len(domains)]] if domains else []
