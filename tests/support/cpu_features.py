"""The CPU features by which vLLM and torch choose kernels, and how to hide them.

`ELDR_CPU=avx2 make test-families` runs as on a CPU with AVX2 but without AVX-512. Valid values are the keys
of `FEATURES`. Features that the machine lacks cannot be added.
"""

import os
import platform
from collections.abc import Mapping
from pathlib import Path

import pytest

CPU_ENV = "ELDR_CPU"
MASK = Path(__file__).with_name("masked_cpu")
FEATURES = {  # name -> required flags of /proc/cpuinfo, lowest first
    "avx2": {"avx2"},
    "avx512": {"avx512f", "avx512vl", "avx512bw", "avx512dq"},
    "avx512_bf16": {"avx512_bf16"},
    "amx": {"amx_tile", "amx_bf16"},
}
# Variables that hide the features from torch's kernels and oneDNN, which do not use torch.cpu.
_LIBRARIES = {
    "avx2": {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"},
    "avx512": {"ATEN_CPU_CAPABILITY": "avx512", "ONEDNN_MAX_CPU_ISA": "AVX512_CORE"},
    "avx512_bf16": {"ATEN_CPU_CAPABILITY": "avx512", "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"},
}


def limited_to(best: str, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables to add to `environment` so that a process sees no feature above `best`."""
    if best not in _LIBRARIES:
        raise pytest.UsageError(f"{CPU_ENV} must be one of {', '.join(_LIBRARIES)}, got {best!r}")
    path = os.pathsep.join(filter(None, [str(MASK), environment.get("PYTHONPATH")]))
    return _LIBRARIES[best] | {CPU_ENV: best, "PYTHONPATH": path}


def available() -> list[str]:
    """Return the features that tests see, lowest first."""
    flags = set(_cpuinfo().get("flags", "").split())
    features = [feature for feature, needs in FEATURES.items() if needs <= flags]
    best = os.environ.get(CPU_ENV)
    return features[: list(FEATURES).index(best) + 1] if best else features


def description() -> str:
    """Return the model of the CPU and the features that tests see."""
    model = _cpuinfo().get("model name", platform.machine())
    hidden = f", others hidden by {CPU_ENV}" if CPU_ENV in os.environ else ""
    return f"cpu: {os.cpu_count()} x {model}, {' '.join(available()) or 'no AVX2'}{hidden}"


def _cpuinfo() -> dict[str, str]:
    """Return the entry of the last CPU in /proc/cpuinfo."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
