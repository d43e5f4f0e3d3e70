"""Our commands without a process of their own, which imports for seconds."""

from __future__ import annotations

import importlib

from click.testing import Result
from typer.testing import CliRunner

from tools.cli import app_of


def command(module: str, *arguments: object) -> Result:
    """What `python -m module` does with these arguments, in this process."""
    entry = getattr(importlib.import_module(module), module.rpartition(".")[2])
    return CliRunner().invoke(app_of(entry), [str(a) for a in arguments], prog_name=module)
