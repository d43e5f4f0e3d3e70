"""Classes of other packages, by import path."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from eldr_serve.routing.types import PolicyError


def load(path: str, what: str) -> Any:
    """What `my_package.module:Name` names; else PolicyError, a sentence about `what`."""
    module, _, name = path.partition(":")
    try:
        return getattr(import_module(module), name)
    except Exception as error:  # a stranger's module may raise anything
        why = (str(error).splitlines() or [""])[0]
        raise PolicyError(f"{what} cannot be imported ({type(error).__name__}: {why})") from error
