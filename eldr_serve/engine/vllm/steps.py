"""Accumulate the steps of this process's engine as sums for a fit of the step cost."""

from __future__ import annotations

import threading
from typing import Any

from eldr_serve.scheduling.cost import StepSums

_MAX_RECORDS = 4096  # records to buffer before summing them

_Records = list[dict[str, Any]]
_lock = threading.Lock()
_sums = StepSums()
_steps: _Records = []
_prompt_steps: _Records = []


def add(steps: _Records, prompt_steps: _Records) -> None:
    """Add records of decode steps and of steps that computed prompts (see EldrStats).

    Records are buffered, since summing each one separately would dominate their cost.
    """
    with _lock:
        _steps.extend(steps)
        _prompt_steps.extend(prompt_steps)
        if len(_steps) + len(_prompt_steps) > _MAX_RECORDS:
            _sum()


def take() -> StepSums:
    """Return the sums over the steps since the last call."""
    global _sums
    with _lock:
        _sum()
        taken, _sums = _sums, StepSums()
    return taken


def _sum() -> None:
    global _sums
    sums = StepSums.of(
        [s["requests"] for s in _steps],
        [s["kv_tokens"] for s in _steps],
        [sum(s["active_by_layer"]) for s in _steps],
        [s["seconds"] for s in _steps],
    ) + StepSums.of_prompts(
        *([s[key] for s in _prompt_steps] for key in ("requests", "kv_tokens", "prompt_tokens", "seconds"))
    )
    _sums = _sums + sums
    _steps.clear()
    _prompt_steps.clear()
