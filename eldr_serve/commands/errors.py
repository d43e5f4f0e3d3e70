"""Error handling of this package's commands: exit status 2 and one sentence on standard error."""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable
from typing import Any

import typer
from pydantic import ValidationError

from eldr_serve.errors import UserInputError

# Any other exception is a fault of the program and ends with a traceback. A full disk or a lost connection is
# an OSError without the name of a file.
USER_ERRORS = (UserInputError, ValidationError, UnicodeDecodeError, json.JSONDecodeError, OSError)


def exit_on_bad_input(command: Callable[..., None]) -> Callable[..., None]:
    """Wrap a command so that USER_ERRORS exit with status 2."""

    @functools.wraps(command)
    def run_command(*args: Any, **kwargs: Any) -> None:
        try:
            command(*args, **kwargs)
        except USER_ERRORS as error:
            sentence = " ".join(str(error).split())
            print(f"{command.__name__}: {sentence}", file=sys.stderr)
            raise typer.Exit(2) from None

    return run_command


def app_of(*commands: Callable[..., None]) -> typer.Typer:
    """Return an app with the command's options and `--help`; the first argument selects one of several."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    for command in commands:
        app.command(command.__name__)(exit_on_bad_input(command))
    return app


def run(*commands: Callable[..., None]) -> None:
    """Run a command as `python -m`, or one of several."""
    app_of(*commands)()
