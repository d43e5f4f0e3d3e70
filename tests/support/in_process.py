"""Runs of our commands in this process, since importing them in another one takes seconds."""

import importlib
from collections.abc import Callable
from typing import Any

from click.testing import Result
from typer.testing import CliRunner

from eldr_serve.commands.run import app_of


def command(entry: str | Callable[..., None], *arguments: object, **options: object) -> Result:
    """Run `python -m entry`, or the command itself, in this process."""
    name = entry if isinstance(entry, str) else entry.__name__
    if isinstance(entry, str):
        entry = getattr(importlib.import_module(entry), entry.rpartition(".")[2])
    words = [*map(str, arguments), *(f"--{k.replace('_', '-')}={v}" for k, v in options.items())]
    return CliRunner().invoke(app_of(entry), words, prog_name=name)


def sentence(done: Any) -> str:
    """Check that a command has refused bad input with status 2, and return its only line."""
    assert 2 in (getattr(done, "exit_code", None), getattr(done, "returncode", None)), done.stderr
    (line,) = done.stderr.strip().splitlines()
    return str(line)
