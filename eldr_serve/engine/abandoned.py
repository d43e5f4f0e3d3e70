"""Prompts whose KV blocks no decode engine will read, in each worker of a prefill engine.

A client may disconnect before, in or after the step in which its prompt ends. The engine's own id of the
prompt reaches the caller only with the answer, so callers name their prompts themselves. A name that was
abandoned is remembered for `REMEMBERED_S`.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping

REMEMBERED_S = 120.0  # longer than a prompt waits and runs after its client has disconnected


class AbandonedPrompts:
    """The prompts whose blocks a worker holds, and the names of abandoned prompts."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._names: dict[str, str] = {}  # engine's id -> caller's name, of prompts with held blocks
        self._abandoned: OrderedDict[str, float] = OrderedDict()  # caller's name -> time of abandonment

    def hold(self, names: Mapping[str, str]) -> None:
        """Record finished prompts whose blocks are held: engine's id -> caller's name."""
        self._names.update(names)

    def abandon(self, names: Iterable[str]) -> None:
        """Record that no engine will read these prompts, finished or not."""
        now_s = self._clock()
        while self._abandoned and next(iter(self._abandoned.values())) < now_s - REMEMBERED_S:
            self._abandoned.popitem(last=False)
        for name in names:
            self._abandoned[name] = now_s
            self._abandoned.move_to_end(name)

    def ids_to_free(self) -> list[str]:
        """Return the engine's ids of abandoned prompts whose blocks are held."""
        if not self._abandoned:
            return []
        return [engine_id for engine_id, name in self._names.items() if name in self._abandoned]

    def forget(self, engine_ids: Iterable[str]) -> None:
        """Remove prompts whose blocks have been freed for any reason."""
        for engine_id in engine_ids:
            self._abandoned.pop(self._names.pop(engine_id, ""), None)
