"""Error handling of this package's commands: exit status 2 and one sentence on standard error."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import typer


class BadInput(ValueError):  # noqa: N818 - the user's error, not the program's
    """Unusable user input; the message is one sentence."""


def bad_input_exits(command: Callable[..., None]) -> Callable[..., None]:
    """Wrap a command so that ValueError (ArtifactError, PolicyError, ...) and OSError exit with status 2."""

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
    """Return an app with the command's options and `--help`; the first argument selects one of several."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    for command in commands:
        app.command(command.__name__)(bad_input_exits(command))
    return app


def run(*commands: Callable[..., None]) -> None:
    """Run a command as `python -m`, or one of several."""
    app_of(*commands)()
