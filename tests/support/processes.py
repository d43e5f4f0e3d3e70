"""Commands in processes of their own."""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.support.shipped import ROOT


def run_command(
    *command: object, timeout_s: float = 120, cwd: Path = ROOT, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end, and return its status and its output as text."""
    words = [str(word) for word in command]
    return subprocess.run(
        words, capture_output=True, text=True, cwd=cwd, timeout=timeout_s, check=False, env=env
    )


def output(*command: object, **options: Any) -> str:
    """Run a command like `run_command`, check that it succeeds, and return its standard output."""
    done = run_command(*command, **options)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def python(
    *arguments: object, timeout_s: float = 120, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run Python like `run_command`, with additional variables of the environment."""
    return run_command(sys.executable, *arguments, timeout_s=timeout_s, env=os.environ | environment)
