"""Error handling of this package's commands: an exit status and one sentence on standard error."""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable
from typing import Any

import typer
from pydantic import ValidationError

from eldr_serve.errors import ServiceFailedError, UserInputError

# Any other exception is a fault of the program and ends with a traceback. OSError is included, since a full
# disk or a lost connection is not a fault of the program either.
USER_ERRORS = (UserInputError, ValidationError, UnicodeDecodeError, json.JSONDecodeError, OSError)
EXPECTED_ERRORS = (*USER_ERRORS, ServiceFailedError)


def exit_status(error: BaseException) -> int:
    """Return the exit status for one of EXPECTED_ERRORS."""
    return 1 if isinstance(error, ServiceFailedError) else 2


def exit_on_expected_error(command: Callable[..., None]) -> Callable[..., None]:
    """Wrap a command so that EXPECTED_ERRORS print one sentence and end it."""

    @functools.wraps(command)
    def run_command(*args: Any, **kwargs: Any) -> None:
        try:
            command(*args, **kwargs)
        except EXPECTED_ERRORS as error:
            sentence = " ".join(str(error).split())
            print(f"{command.__name__}: {sentence}", file=sys.stderr)
            raise typer.Exit(exit_status(error)) from None

    return run_command
