"""How the commands of this package say no: exit status 2 and one sentence on standard error."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import typer


class BadInput(ValueError):  # noqa: N818 - it is the user's, not ours
    """What the user gave cannot be used; one sentence."""


def bad_input_exits(command: Callable[..., None]) -> Callable[..., None]:
    """The command, with ValueError (ArtifactError, PolicyError, ...) and OSError as exit status 2."""

    @functools.wraps(command)
    def guarded(*args: Any, **kwargs: Any) -> None:
        try:
            command(*args, **kwargs)
        except (ValueError, OSError) as error:
            sentence = " ".join(str(error).split())
            print(f"{command.__name__}: {sentence}", file=sys.stderr)
            raise typer.Exit(2) from None

    return guarded


def app_of(*commands: Callable[..., None]) -> typer.Typer:
    """The command with its options and its `--help`; of several, the one that the first argument names."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    for command in commands:
        app.command(command.__name__)(bad_input_exits(command))
    return app


def run(*commands: Callable[..., None]) -> None:
    """Run a command as `python -m`, or one of several."""
    app_of(*commands)()
