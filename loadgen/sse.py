"""Timing of one OpenAI stream (server-sent events)."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import AsyncIterable, Callable, Iterable
from dataclasses import dataclass, field
from typing import Any


class StreamError(RuntimeError):
    """The request failed, according to an event or the end of the stream."""


@dataclass
class StreamTiming:
    """Times of one streamed answer, in s since the request was sent.

    Attributes:
        chunk_times_s: arrival of each chunk that has tokens; a chunk of several choices counts once a choice.
        completion_tokens, prompt_tokens: as the server reports them; None if it does not.
    """

    chunk_times_s: list[float] = field(default_factory=list)
    finish_reason: str | None = None
    completion_tokens: int | None = None
    prompt_tokens: int | None = None
    text: str = ""

    @property
    def ttft_s(self) -> float | None:
        """Return the time to the first token."""
        return self.chunk_times_s[0] if self.chunk_times_s else None

    @property
    def tpot_s(self) -> float | None:
        """Return the time per output token after the first chunk; None below two chunks."""
        if len(self.chunk_times_s) < 2:
            return None
        tokens = self.completion_tokens or len(self.chunk_times_s)
        return (self.chunk_times_s[-1] - self.chunk_times_s[0]) / max(1, tokens - 1)

    @property
    def chunk_gaps_s(self) -> list[float]:
        """Return the times between successive chunks, which can have several tokens each."""
        return [later - earlier for earlier, later in itertools.pairwise(self.chunk_times_s)]

    @property
    def end_s(self) -> float | None:
        """Return the time to the last token."""
        return self.chunk_times_s[-1] if self.chunk_times_s else None

    def take(self, raw: bytes | str, now_s: Callable[[], float]) -> bool:
        """Read one line of the body, and return whether the stream has ended.

        Args:
            now_s: returns the time since the request was sent. It is called once per event.

        Raises:
            StreamError: an error event, or one that is not JSON.
        """
        line = raw.decode() if isinstance(raw, bytes) else raw
        if not line.startswith("data:"):
            return False
        data = line[len("data:") :].strip()
        if data == "[DONE]":
            return True
        try:
            event: dict[str, Any] = json.loads(data)
        except ValueError as error:
            raise StreamError(f"an event is not JSON: {data[:80]!r}") from error
        if "error" in event:
            reported = event["error"]
            raise StreamError(
                str(reported.get("message", reported) if isinstance(reported, dict) else reported)
            )
        self._take(event, now_s())
        return False

    def _take(self, event: dict[str, Any], now_s: float) -> None:
        if usage := event.get("usage"):
            self.completion_tokens = usage.get("completion_tokens")
            self.prompt_tokens = usage.get("prompt_tokens")
        for choice in event.get("choices") or []:
            delta = choice.get("delta") or {}
            piece = choice.get("text") or delta.get("content")
            self.text += piece or ""
            self.finish_reason = choice.get("finish_reason") or self.finish_reason
            # A token may be half a character and have no text; a role alone is not a token.
            if piece or choice.get("text") is not None or (delta and "role" not in delta):
                self.chunk_times_s.append(now_s)


def read_stream(
    lines: Iterable[bytes | str], start_s: float, clock: Callable[[], float] = time.perf_counter
) -> StreamTiming:
    """Read a stream to its end and return its times.

    Args:
        lines: lines of the response body, as they arrive.
        start_s: clock() when the request was sent.

    Raises:
        StreamError: as StreamTiming.take, or an end without [DONE].
    """
    timing = StreamTiming()
    if any(timing.take(line, lambda: clock() - start_s) for line in lines):
        return timing
    raise StreamError("the stream ended without [DONE]")


async def read_stream_async(lines: AsyncIterable[bytes], start_s: float) -> StreamTiming:
    """Read an asynchronous stream as read_stream does. `start_s` is a time of time.perf_counter()."""
    timing = StreamTiming()
    async for line in lines:
        if timing.take(line, lambda: time.perf_counter() - start_s):
            return timing
    raise StreamError("the stream ended without [DONE]")
