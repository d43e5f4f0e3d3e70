"""Entry point of vLLM's plug-ins, called in each of its processes; it does nothing unless switched on."""

from __future__ import annotations

import os

SWITCH = "ELDR_EXPERT_PARALLEL"  # 1: CPU engines may have expert parallelism


def switched_on() -> bool:
    """Whether the environment asks for it."""
    return os.environ.get(SWITCH) == "1"


def register() -> None:
    """Have vLLM make our MoE layers, if the environment asks for it.

    Raises:
        UnsupportedEngineError: another vLLM than the one that this was checked on, or not on a CPU.
    """
    if not switched_on():
        return
    from eldr_serve.engine.vllm.compat.ep import register_layers

    register_layers()
