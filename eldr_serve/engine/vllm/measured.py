"""What this process's engine has measured: KV cache usage, steps, and the expert counts of prompts."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping
from typing import Any

from eldr_serve.scheduling.cost import StepSums

PromptCounts = tuple[int, str]  # number of prompt tokens, packed counts (see pack_counts)

_MAX_RECORDS = 4096  # records to buffer before summing them
_Records = list[dict[str, Any]]


class Measured:
    """Measurements that the engine's statistics bring and its replica reads; thread-safe.

    Attributes:
        kv_usage: share of KV blocks in use after the newest step, 0 to 1, also while the engine is idle.
    """

    def __init__(self) -> None:
        self.kv_usage = 0.0
        self._lock = threading.Lock()
        self._sums = StepSums()
        self._steps: _Records = []
        self._prompt_steps: _Records = []
        self._awaited: dict[str, asyncio.Future[PromptCounts]] = {}

    def add_steps(self, steps: _Records, prompt_steps: _Records) -> None:
        """Add records of decode steps and of steps that computed prompts (see EldrStats).

        Records are buffered, since summing each one separately would dominate their cost.
        """
        with self._lock:
            self._steps += steps
            self._prompt_steps += prompt_steps
            if len(self._steps) + len(self._prompt_steps) > _MAX_RECORDS:
                self._sum()

    def take_steps(self) -> StepSums:
        """Return the sums over the steps since the last call, for a fit of the step cost."""
        with self._lock:
            self._sum()
            taken, self._sums = self._sums, StepSums()
        return taken

    def _sum(self) -> None:
        steps, self._steps = self._steps, []
        prompts, self._prompt_steps = self._prompt_steps, []
        self._sums = (
            self._sums
            + StepSums.of(
                [s["requests"] for s in steps],
                [s["kv_tokens"] for s in steps],
                [sum(s["active_by_layer"]) for s in steps],
                [s["seconds"] for s in steps],
            )
            + StepSums.of_prompts(
                *([s[key] for s in prompts] for key in ("requests", "kv_tokens", "prompt_tokens", "seconds"))
            )
        )

    def awaits_counts(self, name: str) -> bool:
        """Return whether a call waits for the expert counts of this prompt."""
        return name in self._awaited

    async def counts_of(self, name: str) -> PromptCounts:
        """Wait for the expert counts of a prompt; call it before the prompt is given to the engine.

        Args:
            name: the caller's name of the prompt.
        """
        with self._lock:
            future = self._awaited[name] = asyncio.get_running_loop().create_future()
        try:
            counts: PromptCounts = await future
            return counts
        finally:
            with self._lock:
                self._awaited.pop(name, None)

    def deliver_counts(self, found: Mapping[str, PromptCounts]) -> None:
        """Deliver expert counts, by their prompts' names, to the calls that wait for them."""
        with self._lock:
            awaited = [(self._awaited.pop(name), found[name]) for name in found.keys() & self._awaited.keys()]
        for future, counts in awaited:
            future.get_loop().call_soon_threadsafe(_set_result, future, counts)


def _set_result(future: asyncio.Future[PromptCounts], counts: PromptCounts) -> None:
    if not future.done():
        future.set_result((counts[0], counts[1]))


MEASURED = Measured()
