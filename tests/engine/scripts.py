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


def run_script(name: str, *arguments: object, **env: str) -> None:
    """Run a script beside the tests; fails with the end of its output."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name(name)), *map(str, arguments)],
        capture_output=True, text=True, timeout=400, check=False,
        env=os.environ | ENGINE_ENV | {"PYTHONPATH": path} | env,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
