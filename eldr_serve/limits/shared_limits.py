"""Tenants' usage of their limits at each ingress replica, shared between the replicas."""

from __future__ import annotations

import time
from collections.abc import Callable

from eldr_serve.limits.tenants import Usage

_SILENT_S = 60.0


class SharedLimits:
    """Usage by ingress replica, held by the router; a replica silent for a minute is removed."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._usage: dict[str, tuple[float, Usage]] = {}

    def exchange(self, ingress: str, usage: Usage) -> dict[str, Usage]:
        """Store one replica's usage since its start; return the usage of the other replicas."""
        now_s = self._clock()
        self._usage[ingress] = (now_s, usage)
        self._usage = {name: item for name, item in self._usage.items() if now_s - item[0] <= _SILENT_S}
        return {name: item[1] for name, item in self._usage.items() if name != ingress}
