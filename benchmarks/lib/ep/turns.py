"""Measurements of settings (*arms*) that take turns on one EP engine, kept in a journal."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from contextlib import AbstractContextManager
from time import monotonic
from typing import Any, TypeVar

from loadgen.journal import Journal

Key = TypeVar("Key", bound=tuple[Hashable, ...])
EngineT = TypeVar("EngineT")


def measure_in_turns(
    journal: Journal,
    keys: Iterable[Key],
    engine: Callable[[], AbstractContextManager[EngineT]],
    measure: Callable[[EngineT, Key], Any],
    minutes: float | None,
) -> dict[Key, Any]:
    """Return the measurement of each key, in this order. Measure only those that the journal lacks.

    Args:
        engine: called if anything is left to measure. It returns a context manager of the engine.
        measure: function that returns a JSON-serialisable result.
        minutes: time limit, after which TimeoutError is raised; None: no limit.
    """
    start, keys = monotonic(), list(keys)
    missing = [key for key in keys if journal.get(_name(key)) is None]
    if missing:
        with engine() as running_engine:
            for key in missing:
                if minutes is not None and monotonic() - start > 60 * minutes:
                    raise TimeoutError("the time is up; results are kept; run the command again to continue")
                journal.put(_name(key), measure(running_engine, key))
    return {key: journal.get(_name(key)) for key in keys}


def _name(key: tuple[Hashable, ...]) -> str:
    return "/".join(map(str, key))
