"""The steps of this process's engine since somebody last asked, as sums for a cost fit."""

from __future__ import annotations

import threading
from typing import Any

from eldr_serve.routing.cost import StepSums

_lock = threading.Lock()
_sums = StepSums()


def add(steps: list[dict[str, Any]], prompt_steps: list[dict[str, Any]]) -> None:
    """Take records of decode steps and of steps that computed prompts (see EldrStats)."""
    global _sums
    sums = StepSums.of(
        [s["requests"] for s in steps],
        [s["kv_tokens"] for s in steps],
        [sum(s["active_by_layer"]) for s in steps],
        [s["seconds"] for s in steps],
    ) + StepSums.of_prompts(
        *([s[key] for s in prompt_steps] for key in ("requests", "kv_tokens", "prompt_tokens", "seconds"))
    )
    with _lock:
        _sums = _sums + sums


def take() -> StepSums:
    """What came since the last call."""
    global _sums
    with _lock:
        taken, _sums = _sums, StepSums()
    return taken
