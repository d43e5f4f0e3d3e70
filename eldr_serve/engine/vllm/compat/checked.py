"""Which vLLM this was checked on, and what is said of any other."""

from __future__ import annotations

from typing import Any

import vllm

CHECKED = "0.32.0"


class UnsupportedEngineError(RuntimeError):
    """The engine cannot serve as it is set up, or its counts would not be exact; one sentence says how."""


def check_names(user: str, *needed: tuple[Any, str]) -> None:
    """Raise UnsupportedEngineError if a name of an owner is not there: no public interface promises them."""
    for owner, name in needed:
        # A dataclass's field without a default is no attribute of the class.
        if not hasattr(owner, name) and name not in getattr(owner, "__annotations__", {}):
            raise UnsupportedEngineError(
                f"vLLM {vllm.__version__} has no {owner.__name__}.{name}, which {user} needs; "
                f"it was checked on {CHECKED}"
            )
