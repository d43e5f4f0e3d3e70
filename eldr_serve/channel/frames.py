"""The frames of a channel.

A frame is `length u32 | kind u8 | call u32 | tokens u32 | payload`, big-endian.
`length` is the size of the payload in bytes.

    caller -> server   HELLO (version and secret), CALL, CANCEL, NOTE, PING
    server -> caller   WELCOME, DATA, TOKENS, END, FAIL, PING, LEAVING

The caller is an ingress; the server is an engine or the router. Only the router has open calls.

A TOKENS frame is a DATA frame whose payload begins with the ids of its `tokens` tokens, u32 each,
little-endian. An ingress needs these ids to continue the answer on another engine.

A call ends with one END or FAIL, even after a CANCEL. The server then does no further work on the call.
An open call (OpenCall, OpenCallHandler) ends with its CANCEL. A NOTE is a one-way message about an open call.
CANCEL and NOTE of an open call carry the number of tokens that its request has generated so far.
The payload of an engine's PING is its status report, and the payload of its END is its report on the call.
Both are msgpack, and may be empty.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from enum import IntEnum

VERSION = 5
HEAD = struct.Struct("!IBII")
MAX_HELLO_BYTES = 1024
MAX_FRAME_BYTES = 64 * 2**20  # one frame holds a request's body and its prefill result
PING_S = 1.0


class Kind(IntEnum):
    """The type of a frame."""

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
    NOTE = 11


class BrokenFrameError(ValueError):
    """The peer violates the protocol; its connection is closed."""


def frame(kind: Kind, call: int = 0, payload: bytes = b"", tokens: int = 0) -> bytes:
    """Encode a frame.

    Args:
        call: number of the call on this connection.
        tokens: number of generated tokens in the payload.
    """
    return HEAD.pack(len(payload), kind, call, tokens) + payload


class Frames:
    """Splits received bytes into frames.

    Args:
        max_bytes: maximum size of a payload; a longer payload is refused before it is read.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._buffer = bytearray()

    @property
    def incomplete(self) -> bool:
        """Return whether part of a frame is buffered."""
        return bool(self._buffer)

    def feed(self, data: bytes) -> Iterator[tuple[int, int, int, bytes]]:
        """Yield (kind, call, tokens, payload) of each complete frame.

        Raises:
            BrokenFrameError: a payload is longer than `max_bytes`.
        """
        buffer = self._buffer
        buffer += data
        start = 0
        try:
            while len(buffer) - start >= HEAD.size:
                length, kind, call, tokens = HEAD.unpack_from(buffer, start)
                if length > self.max_bytes:
                    raise BrokenFrameError(f"a frame has {length} bytes, but the maximum is {self.max_bytes}")
                end = start + HEAD.size + length
                if len(buffer) < end:
                    break
                payload = bytes(memoryview(buffer)[start + HEAD.size : end])
                start = end
                yield kind, call, tokens, payload
        finally:
            del buffer[:start]
