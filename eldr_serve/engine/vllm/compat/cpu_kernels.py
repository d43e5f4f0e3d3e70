"""A change of vLLM's choice of kernels on CPUs, for the study of model families."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from eldr_serve.engine.vllm.compat.checked import internal_imports

with internal_imports():
    from vllm.platforms import cpu


def choose_mla_for_amx() -> None:
    """Make vLLM choose its MLA backend for AMX; it uses oneDNN, and therefore runs without AMX too.

    Raises:
        RuntimeError: the CPU has neither AMX nor AVX-512 with bfloat16.
    """
    functions = vars(torch.cpu)
    if not (functions["_is_amx_tile_supported"]() or functions["_is_avx512_bf16_supported"]()):
        raise RuntimeError("vLLM's MLA backend for AMX needs a CPU with AMX, or AVX-512 with bfloat16")

    class WithAmx:
        """A stand-in for torch in the module that chooses backends; other layers keep their kernels."""

        cpu = SimpleNamespace(**functions | {"_is_amx_tile_supported": lambda: True})

        def __getattr__(self, name: str) -> Any:
            return getattr(torch, name)

    cpu.torch = WithAmx()
