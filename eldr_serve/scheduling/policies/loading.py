"""Import of classes from other packages by path."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from eldr_serve.scheduling.types import PolicyError


def load(path: str, what: str) -> Any:
    """Import `my_package.module:Name`; raise PolicyError, one sentence about `what`, if that fails."""
    module, _, name = path.partition(":")
    try:
        return getattr(import_module(module), name)
    except Exception as error:  # another package's module may raise anything
        why = (str(error).splitlines() or [""])[0]
        raise PolicyError(f"{what} cannot be imported ({type(error).__name__}: {why})") from error
