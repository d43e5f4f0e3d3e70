"""Frames: `length u32 | kind u8 | call u32 | tokens u32 | payload`, big-endian; `length` is the payload's.

    ingress -> engine   HELLO (version and secret), CALL, CANCEL, PING
    engine -> ingress   WELCOME, DATA, TOKENS, END, FAIL, PING, LEAVING

A TOKENS is a DATA whose payload begins with the ids of its `tokens` tokens, u32 each, little-endian. An
ingress needs these ids to continue the answer on another engine.

A call's frames end with one END or FAIL, also after a CANCEL; the engine does no further work on the call.
A PING from an engine carries its status report as payload (msgpack, may be empty).
An END carries the engine's report on its part of the call as payload (msgpack, may be empty).
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from enum import IntEnum

VERSION = 2
HEAD = struct.Struct("!IBII")
MAX_HELLO_BYTES = 1024
MAX_FRAME_BYTES = 64 * 2**20  # a request's body and what prefill said of it
PING_S = 1.0


class Kind(IntEnum):
    """What a frame says."""

    HELLO = 1
    WELCOME = 2
    CALL = 3
    CANCEL = 4
    DATA = 5
    END = 6
    FAIL = 7
    PING = 8
    LEAVING = 9
    TOKENS = 10


class BrokenFrame(ValueError):  # noqa: N818
    """The peer does not speak this protocol; its connection is of no further use."""


def frame(kind: Kind, call: int = 0, payload: bytes = b"", tokens: int = 0) -> bytes:
    """One frame. `call`: number of the call on this connection; `tokens`: generated tokens in it."""
    return HEAD.pack(len(payload), kind, call, tokens) + payload


class Frames:
    """Cuts what arrives into frames.

    Args:
        max_bytes: of a payload; a longer one breaks the connection before it is read.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._buffer = bytearray()

    @property
    def cut(self) -> bool:
        """A frame has begun and not ended."""
        return bool(self._buffer)

    def feed(self, data: bytes) -> Iterator[tuple[int, int, int, bytes]]:
        """(kind, call, tokens, payload) of each frame that is complete; BrokenFrame if it is none."""
        buffer = self._buffer
        buffer += data
        at = 0
        try:
            while len(buffer) - at >= HEAD.size:
                length, kind, call, tokens = HEAD.unpack_from(buffer, at)
                if length > self.max_bytes:
                    raise BrokenFrame(f"a frame of {length} bytes, the most allowed are {self.max_bytes}")
                end = at + HEAD.size + length
                if len(buffer) < end:
                    break
                payload = bytes(memoryview(buffer)[at + HEAD.size : end])
                at = end
                yield kind, call, tokens, payload
        finally:
            del buffer[:at]
