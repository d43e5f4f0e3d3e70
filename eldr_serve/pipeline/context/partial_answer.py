"""The part of an answer that has arrived, after which another engine can continue."""

from __future__ import annotations

from eldr_serve.channel import Chunk
from eldr_serve.engine.calls import created_at, is_end

_BYTES_PER_ID = 4  # uint32


class PartialAnswer:
    """The answer to one request so far, over all its attempts.

    Args:
        stream: whether the client gets the answer as a stream.

    Attributes:
        num_tokens: number of generated tokens.
        encoded_ids: ids of the generated tokens, uint32 bytes as in calls to engines, if known.
        has_started: whether part of the answer was sent to the client.
        is_complete: whether the complete answer was sent to the client.
        created: timestamp in the answer's chunks, s since 1970; None before the first chunk of a stream.
    """

    def __init__(self, *, stream: bool) -> None:
        self._stream = stream
        self.num_tokens = 0
        self.encoded_ids = bytearray()
        self.has_started = False
        self.is_complete = False
        self.created: int | None = None

    @property
    def num_ids(self) -> int:
        """Return the number of generated tokens whose ids are known."""
        return len(self.encoded_ids) // _BYTES_PER_ID

    @property
    def can_continue(self) -> bool:
        """Return whether another engine can continue after the last token."""
        return 0 < self.num_tokens == self.num_ids

    def append(self, chunk: Chunk) -> None:
        """Append the next part of the answer."""
        self.num_tokens += chunk.num_tokens
        self.encoded_ids += chunk.ids
        if not chunk.payload:
            return
        if not self.has_started and self._stream:
            self.created = created_at(chunk.payload)
        self.has_started = True
        self.is_complete = not self._stream or is_end(chunk.payload)

    def discard(self) -> None:
        """Discard what has been generated."""
        self.num_tokens, self.encoded_ids = 0, bytearray()
