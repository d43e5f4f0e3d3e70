"""Deliver the signatures that this process's engine measures to the calls that wait for them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping

Signature = tuple[int, str]  # number of prompt tokens, packed counts (see pack_counts)

_lock = threading.Lock()
_waiting: dict[str, asyncio.Future[Signature]] = {}


def is_awaited(name: str) -> bool:
    """Return whether a call waits for the signature of this prompt."""
    return name in _waiting


async def wait_for(name: str) -> Signature:
    """Wait for the signature of a prompt; call it before the prompt is given to the engine.

    Args:
        name: the caller's name of the prompt.
    """
    loop = asyncio.get_running_loop()
    with _lock:
        future = _waiting[name] = loop.create_future()
    try:
        signature: Signature = await future
        return signature
    finally:
        with _lock:
            _waiting.pop(name, None)


def put(found: Mapping[str, Signature]) -> None:
    """Deliver signatures by their prompts' names; thread-safe."""
    with _lock:
        awaited = [(_waiting.pop(name), signature) for name, signature in found.items() if name in _waiting]
    for future, signature in awaited:
        future.get_loop().call_soon_threadsafe(_set_result, future, signature)


def _set_result(future: asyncio.Future[Signature], signature: Signature) -> None:
    if not future.done():
        future.set_result((signature[0], signature[1]))
