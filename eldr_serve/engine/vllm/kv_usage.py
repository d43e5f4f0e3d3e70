"""How full this process's engine is, as its scheduler said after its newest step."""

from __future__ import annotations

_usage = 0.0


def put(usage: float) -> None:
    """Take the share of KV blocks in use, 0 to 1."""
    global _usage
    _usage = usage


def last() -> float:
    """The newest figure. It stands while the engine is idle; 0 before the first step."""
    return _usage
