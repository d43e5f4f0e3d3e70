"""Calls over a channel, read to their end."""

from __future__ import annotations

from eldr_serve.channel import Call


async def read_all(call: Call) -> tuple[bytes, int]:
    """Return the whole answer to a call and its number of tokens."""
    payload, tokens = b"", 0
    while (chunk := await call.read()) is not None:
        payload, tokens = payload + chunk.payload, tokens + chunk.tokens
    return payload, tokens
