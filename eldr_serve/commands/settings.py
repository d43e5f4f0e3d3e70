"""Commands whose options are the fields of a dataclass."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import MISSING, fields
from typing import Any, TypeVar, get_type_hints

Settings = TypeVar("Settings")


def command_of_settings(command: Callable[[Settings], None]) -> Callable[..., None]:
    """Turn a function of one dataclass into a command with one option for each field of the dataclass."""
    (settings,) = (hint for name, hint in get_type_hints(command).items() if name != "return")
    hints = get_type_hints(settings, include_extras=True)

    @functools.wraps(command)
    def from_options(**values: Any) -> None:
        command(settings(**values))

    parameters = [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if field.default is MISSING else field.default,
            annotation=hints[field.name],
        )
        for field in fields(settings)
    ]
    from_options.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    from_options.__annotations__ = hints
    return from_options
