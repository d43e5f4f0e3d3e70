"""Import of classes from other packages by path."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from eldr_serve.scheduling.types import PolicyError


def import_object(path: str, label: str) -> Any:
    """Import `my_package.module:Name`; raise PolicyError, naming `label`, if that fails."""
    module, _, name = path.partition(":")
    try:
        return getattr(import_module(module), name)
    except Exception as error:  # another package's module may raise anything
        reason = (str(error).splitlines() or [""])[0]
        raise PolicyError(f"{label} cannot be imported ({type(error).__name__}: {reason})") from error
