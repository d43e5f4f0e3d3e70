"""Functions that run this package's commands, as `python -m` or as an app."""

from __future__ import annotations

from collections.abc import Callable

import typer

from eldr_serve.commands.errors import exit_on_expected_error


def app_of(*commands: Callable[..., None]) -> typer.Typer:
    """Return an app with the command's options and `--help`; the first argument selects one of several."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    for command in commands:
        app.command(command.__name__)(exit_on_expected_error(command))
    return app


def run(*commands: Callable[..., None]) -> None:
    """Run a command, or one of several, as `python -m`."""
    app_of(*commands)()
