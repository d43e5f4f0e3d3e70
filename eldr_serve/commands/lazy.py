"""Subcommands that are imported only when they are used, so that `eldr --help` is fast."""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperCommand
from typer.main import get_command

from eldr_serve.errors import UserInputError


class LazyCommand(TyperCommand):
    """A command whose function is imported when it is run, completed or shows its help.

    The callback imports and returns that function.
    """

    def make_context(self, info_name: Any, args: Any, parent: Any = None, **extra: Any) -> Any:
        """Return the context of the imported command."""
        return self.import_command().make_context(info_name, args, parent, **extra)

    def import_command(self) -> Any:
        """Import the command; raise UserInputError, one sentence, if a requirement is not installed."""
        assert self.callback is not None
        app = typer.Typer(add_completion=False)
        try:
            app.command(self.name)(self.callback())
        except ModuleNotFoundError as error:
            package = str(error.name).partition(".")[0]
            if package == "benchmarks":
                raise UserInputError(
                    f"the command is part of the repository, not of the installed package: clone the "
                    f"repository, run `make setup` in it, then `.venv/bin/eldr {self.name}`"
                ) from None
            raise UserInputError(
                f"the command needs the Python package {package}, which is not installed: install "
                "eldr-serve[cpu] or eldr-serve[gpu]"
            ) from None
        return get_command(app)


def resolve(command: Any) -> Any:
    """Return the subcommand with its arguments and options; import it if necessary."""
    return command.import_command() if isinstance(command, LazyCommand) else command
