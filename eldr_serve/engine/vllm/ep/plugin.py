"""The plug-in that registers eldr_serve's expert parallelism, if enabled, in each of vLLM's processes."""

from __future__ import annotations

import os

EXPERT_PARALLEL_ENV = "ELDR_EXPERT_PARALLEL"  # 1: allow expert parallelism on CPU engines


def is_switched_on() -> bool:
    """Return whether the environment enables expert parallelism on CPUs."""
    return os.environ.get(EXPERT_PARALLEL_ENV) == "1"


def register() -> None:
    """Make vLLM use eldr_serve's MoE layers, if the environment enables it.

    Raises:
        UnsupportedEngineError: vLLM is not the checked version, or does not run on a CPU.
    """
    if not is_switched_on():
        return
    from eldr_serve.engine.vllm.compat.ep import register_layers

    register_layers()
