"""Settings that had another name are refused with the new one, and those that are gone by name."""

from __future__ import annotations

from typing import Any

from pydantic import model_validator


def renamed(**names: str | None) -> Any:
    """A validator of a pydantic model: old names of fields, as keywords, with the new ones; None: removed."""

    def refuse(cls: Any, given: Any) -> Any:
        for old, new in names.items():
            if isinstance(given, dict) and old in given:
                raise ValueError(f"{old} is called {new} now" if new else f"{old} was removed: leave it out")
        return given

    return model_validator(mode="before")(refuse)
