"""Engines run as scripts in processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
ENGINE_ENV = {
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
}
TRITON_CPU = Path(__file__).with_name("triton_cpu")


def run_script(name: str, *arguments: object, v2: bool = False, **env: str) -> None:
    """Run a script beside the tests, under Model Runner V2 if asked; fails with the end of its output."""
    folders = [str(TRITON_CPU) if v2 else "", str(ROOT), os.environ.get("PYTHONPATH", "")]
    runner = {"TRITON_INTERPRET": "1"} if v2 else {}
    path = {"PYTHONPATH": os.pathsep.join(filter(None, folders))}
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name(name)), *map(str, arguments)],
        capture_output=True, text=True, timeout=400, check=False,
        env=os.environ | ENGINE_ENV | path | runner | env,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
