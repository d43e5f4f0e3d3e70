"""Deliver the expert counts that this process's engine measures to the calls that wait for them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping

PromptCounts = tuple[int, str]  # number of prompt tokens, packed counts (see pack_counts)

_lock = threading.Lock()
_waiting: dict[str, asyncio.Future[PromptCounts]] = {}


def is_awaited(name: str) -> bool:
    """Return whether a call waits for the expert counts of this prompt."""
    return name in _waiting


async def wait_for(name: str) -> PromptCounts:
    """Wait for the expert counts of a prompt; call it before the prompt is given to the engine.

    Args:
        name: the caller's name of the prompt.
    """
    loop = asyncio.get_running_loop()
    with _lock:
        future = _waiting[name] = loop.create_future()
    try:
        counts: PromptCounts = await future
        return counts
    finally:
        with _lock:
            _waiting.pop(name, None)


def put(found: Mapping[str, PromptCounts]) -> None:
    """Deliver expert counts by their prompts' names; thread-safe."""
    with _lock:
        awaited = [(_waiting.pop(name), counts) for name, counts in found.items() if name in _waiting]
    for future, counts in awaited:
        future.get_loop().call_soon_threadsafe(_set_result, future, counts)


def _set_result(future: asyncio.Future[PromptCounts], counts: PromptCounts) -> None:
    if not future.done():
        future.set_result((counts[0], counts[1]))
