"""Tenants' usage of their limits at each ingress replica, shared between the replicas."""

from __future__ import annotations

import time
from collections.abc import Callable

from eldr_serve.limits.tenants import Taken

_SILENT_S = 60.0


class SharedLimits:
    """Usage by ingress replica, held by the router; a replica silent for a minute is removed."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._taken: dict[str, tuple[float, Taken]] = {}

    def exchange(self, ingress: str, taken: Taken) -> dict[str, Taken]:
        """Store one replica's usage since its start; return that of the other replicas."""
        now = self._clock()
        self._taken[ingress] = (now, taken)
        self._taken = {name: item for name, item in self._taken.items() if now - item[0] <= _SILENT_S}
        return {name: item[1] for name, item in self._taken.items() if name != ingress}
