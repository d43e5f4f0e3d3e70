"""Our commands, mostly without a process of their own, which imports for seconds."""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from click.testing import Result
from shipped import ROOT
from typer.testing import CliRunner

from eldr_serve.command_errors import app_of


def command(entry: str | Callable[..., None], *arguments: object, **options: object) -> Result:
    """What `python -m entry`, or the command itself, does with these arguments, in this process."""
    name = entry if isinstance(entry, str) else entry.__name__
    if isinstance(entry, str):
        entry = getattr(importlib.import_module(entry), entry.rpartition(".")[2])
    words = [*map(str, arguments), *(f"--{k.replace('_', '-')}={v}" for k, v in options.items())]
    return CliRunner().invoke(app_of(entry), words, prog_name=name)


def sentence(done: Any) -> str:
    """With which a command refuses bad input: all that it says, at status 2."""
    assert 2 in (getattr(done, "exit_code", None), getattr(done, "returncode", None)), done.stderr
    (said,) = done.stderr.strip().splitlines()
    return str(said)


def python(*arguments: object, timeout_s: float = 120) -> subprocess.CompletedProcess[str]:
    """Of the repository's root."""
    words = [sys.executable, *map(str, arguments)]
    return subprocess.run(words, capture_output=True, text=True, cwd=ROOT, timeout=timeout_s, check=False)
