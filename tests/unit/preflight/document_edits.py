"""Edits of deployment documents by the location of a value."""

from typing import Any

MISSING = object()  # this value removes the key


def edit(document: Any, path: str, value: Any) -> None:
    """Set the value at `path`, whose names and list indices are joined by dots. Missing parents are made."""
    *parents, last = path.split(".")
    here = document
    for name in parents:
        here = here[int(name)] if name.isdigit() else here.setdefault(name, {})
    if value is MISSING:
        del here[last]
    else:
        here[last] = value
