"""Import of objects from other packages by path."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from eldr_serve.errors import UserInputError


def import_object(path: str, what: str, error_class: type[UserInputError] = UserInputError) -> Any:
    """Import `my_package.module:Name`.

    Args:
        what: name of the setting in the error's sentence.
        error_class: class of the error.

    Raises:
        UserInputError: the import fails; an `error_class`.
    """
    module, _, name = path.partition(":")
    try:
        return getattr(import_module(module), name)
    except Exception as error:  # another package's module may raise anything
        reason = (str(error).splitlines() or [""])[0]
        raise error_class(f"{what} {path!r} cannot be imported ({type(error).__name__}: {reason})") from error
