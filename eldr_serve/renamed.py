"""Settings that had another name are refused with the new one."""

from __future__ import annotations

from typing import Any

from pydantic import model_validator


def renamed(**names: str) -> Any:
    """A validator of a pydantic model: a field's old name, as keyword, is refused and names the new one."""

    def refuse(cls: Any, given: Any) -> Any:
        for old, new in names.items():
            if isinstance(given, dict) and old in given:
                raise ValueError(f"{old} is called {new} now")
        return given

    return model_validator(mode="before")(refuse)
