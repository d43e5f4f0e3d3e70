"""Hide CPU features from torch and vLLM. The variable ELDR_CPU names the best one that remains.

Python imports this module at startup if its folder is in PYTHONPATH (see `cpu_features`).
"""

import os
import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

_AMX = ("_is_amx_tile_supported", "_is_amx_fp16_supported")
_AVX512_BF16 = (*_AMX, "_is_avx512_bf16_supported")
# ELDR_CPU -> functions of torch.cpu that return False; vLLM chooses its kernels by them.
HIDDEN = {"avx2": (*_AVX512_BF16, "_is_avx512_supported"), "avx512": _AVX512_BF16, "avx512_bf16": _AMX}


class _TorchCpuFinder(MetaPathFinder):
    """A finder of torch.cpu, whose loader replaces the functions after executing the module."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != "torch.cpu":
            return None
        sys.meta_path.remove(self)
        spec = PathFinder.find_spec(name, path, target)
        assert spec is not None
        loader: Any = spec.loader
        execute = loader.exec_module

        def execute_and_hide(module: ModuleType) -> None:
            execute(module)
            for function in HIDDEN[os.environ["ELDR_CPU"]]:
                setattr(module, function, lambda: False)

        loader.exec_module = execute_and_hide
        return spec


if "ELDR_CPU" in os.environ:
    sys.meta_path.insert(0, _TorchCpuFinder())
