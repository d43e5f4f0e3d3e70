"""The KV cache usage of this process's engine, as its scheduler last reported it."""

from __future__ import annotations

_usage = 0.0


def put(usage: float) -> None:
    """Store the share of KV blocks in use, 0 to 1."""
    global _usage
    _usage = usage


def last() -> float:
    """Return the value of the newest step, also while the engine is idle; 0 before the first step."""
    return _usage
