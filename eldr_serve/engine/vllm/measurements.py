"""Measurements of a replica's engine: KV cache, steps, and the expert counts of prompts.

vLLM makes the object that receives the engine's statistics (`stats.EldrPromMetrics`), and passes it nothing
that leads to the replica's VllmEngine. Therefore both use the one `MEASUREMENTS` of their process.
"""

from __future__ import annotations

import asyncio
import threading
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from eldr_serve.scheduling.cost import StepSums
from eldr_serve.scheduling.prefixes import BlockChanges, TrackedBlocks

PromptCounts = tuple[int, str]  # number of prompt tokens, packed counts (see pack_counts)

_MAX_RECORDS = 4096  # records to buffer before summing them
_Records = list[dict[str, Any]]


class EngineMeasurements:
    """Measurements that EldrPromMetrics receives with the engine's statistics, and VllmEngine reads.

    All methods are thread-safe.

    Attributes:
        kv_usage: data-parallel rank -> share of KV blocks in use after the newest step, 0 to 1. It remains
            while the engine is idle.
    """

    def __init__(self) -> None:
        self.kv_usage: dict[int, float] = {}
        self._lock = threading.Lock()
        self._sums: defaultdict[int, StepSums] = defaultdict(StepSums)  # sums of each rank
        self._records: defaultdict[int, _Records] = defaultdict(list)  # records of each rank
        self._awaited: dict[str, asyncio.Future[PromptCounts]] = {}
        self._prefixes: TrackedBlocks | None = None  # None until the engine reports blocks

    def add_steps(self, steps: _Records, prompt_steps: _Records, rank: int = 0) -> None:
        """Add a rank's records of decode steps and of steps that computed prompts (see EldrStats).

        Records are buffered, since summing each one separately would dominate their cost.
        """
        with self._lock:
            self._records[rank] += [*steps, *prompt_steps]
            if len(self._records[rank]) > _MAX_RECORDS:
                self._sum(rank)

    def take_steps(self, rank: int = 0) -> StepSums:
        """Return the sums over a rank's steps since the last call, for a fit of the step cost."""
        with self._lock:
            self._sum(rank)
            return self._sums.pop(rank)

    def _sum(self, rank: int) -> None:
        records = self._records.pop(rank, [])
        steps = [record for record in records if "active_by_layer" in record]

        def columns(tokens_key: str) -> list[list[float]]:
            prompts = [record for record in records if tokens_key in record]
            return [[s[key] for s in prompts] for key in ("requests", "kv_tokens", tokens_key, "seconds")]

        self._sums[rank] = (
            self._sums[rank]
            + StepSums.from_steps(
                [s["requests"] for s in steps],
                [s["kv_tokens"] for s in steps],
                [sum(s["active_by_layer"]) for s in steps],
                [s["seconds"] for s in steps],
            )
            + StepSums.from_prompts(*columns("prompt_tokens"))
            + StepSums.from_local_prompts(*columns("local_prompt_tokens"))
        )

    def change_prefixes(self, changes: BlockChanges) -> None:
        """Apply changes of the engine's prefix cache."""
        with self._lock:
            self._prefixes = self._prefixes or TrackedBlocks()
            self._prefixes.apply(changes)

    def take_prefix_changes(self, *, full: bool) -> BlockChanges | None:
        """Return the changes of the prefix cache since the last call, see Engine.take_prefix_changes."""
        with self._lock:
            return None if self._prefixes is None else self._prefixes.take_changes(full=full)

    def awaits_counts(self, name: str) -> bool:
        """Return whether a call waits for the expert counts of this prompt."""
        return name in self._awaited

    async def wait_for_counts(self, name: str) -> PromptCounts:
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

    def deliver_counts(self, counts_by_name: Mapping[str, PromptCounts]) -> None:
        """Deliver expert counts (keys are prompts' names) to the calls that wait for them."""
        with self._lock:
            awaited = [
                (self._awaited.pop(name), counts_by_name[name])
                for name in counts_by_name.keys() & self._awaited.keys()
            ]
        for future, counts in awaited:
            future.get_loop().call_soon_threadsafe(_set_result, future, counts)


def _set_result(future: asyncio.Future[PromptCounts], counts: PromptCounts) -> None:
    if not future.done():
        future.set_result((counts[0], counts[1]))  # vLLM's msgpack makes a list of the tuple


MEASUREMENTS = EngineMeasurements()
