"""Finished prompts whose KV blocks no decode engine will read, by the caller's names for them.

A client that leaves may be heard of before its prompt ends, in the very step in which it ends, or after
it, and the engine's own id of the prompt reaches the caller with the answer alone, which nobody waits
for any more. So the caller names its prompts itself, and a name that is abandoned stays so.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping

REMEMBERED_S = 120.0  # longer than a prompt waits and computes after its client has left


class AbandonedPrompts:
    """A worker's half: prompts that it holds blocks of, and names that were abandoned."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._names: dict[str, str] = {}  # engine's id -> caller's name, of blocks that are held
        self._abandoned: OrderedDict[str, float] = OrderedDict()  # caller's name -> since

    def hold(self, names: Mapping[str, str]) -> None:
        """Prompts that ended and whose blocks are held: engine's id -> caller's name."""
        self._names.update(names)

    def abandon(self, names: Iterable[str]) -> None:
        """Nobody will read these prompts, whether they have ended or not."""
        now = self._now()
        while self._abandoned and next(iter(self._abandoned.values())) < now - REMEMBERED_S:
            self._abandoned.popitem(last=False)
        for name in names:
            self._abandoned[name] = now
            self._abandoned.move_to_end(name)

    def due(self) -> list[str]:
        """Engine's ids of the held prompts that nobody will read."""
        if not self._abandoned:
            return []
        return [engine_id for engine_id, name in self._names.items() if name in self._abandoned]

    def freed(self, engine_ids: Iterable[str]) -> None:
        """The blocks of these prompts are free, whoever asked for it."""
        for engine_id in engine_ids:
            self._abandoned.pop(self._names.pop(engine_id, ""), None)
