"""True signatures of this process's engine, for whoever has asked for them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping

Signature = tuple[int, str]  # tokens of the prompt, its packed counts (see pack_counts)

_lock = threading.Lock()
_waiting: dict[str, asyncio.Future[Signature]] = {}


def asked(name: str) -> bool:
    """Whether somebody waits for the prompt of this name."""
    return name in _waiting


async def of(name: str) -> Signature:
    """The signature of the prompt that a caller names so; ask before the engine is given the prompt."""
    loop = asyncio.get_running_loop()
    with _lock:
        asked = _waiting[name] = loop.create_future()
    try:
        signature: Signature = await asked
        return signature
    finally:
        with _lock:
            _waiting.pop(name, None)


def put(found: Mapping[str, Signature]) -> None:
    """Prompts have been prefilled, by their names; may be called in any thread."""
    with _lock:
        answered = [(_waiting.pop(name), signature) for name, signature in found.items() if name in _waiting]
    for asked, signature in answered:
        asked.get_loop().call_soon_threadsafe(_answer, asked, signature)


def _answer(asked: asyncio.Future[Signature], signature: Signature) -> None:
    if not asked.done():
        asked.set_result((signature[0], signature[1]))
