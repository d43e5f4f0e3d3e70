"""Timing of one OpenAI stream (server-sent events)."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any


class StreamError(RuntimeError):
    """The server said in the stream, or by its shape, that the request failed."""


@dataclass
class StreamTiming:
    """Times of one streamed answer, in s from the sending of the request."""

    token_times_s: list[float] = field(default_factory=list)
    finish_reason: str | None = None
    completion_tokens: int | None = None
    prompt_tokens: int | None = None
    text: str = ""

    @property
    def ttft_s(self) -> float | None:
        """Time to first token."""
        return self.token_times_s[0] if self.token_times_s else None

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first; None below two tokens."""
        if len(self.token_times_s) < 2:
            return None
        tokens = self.completion_tokens or len(self.token_times_s)
        return (self.token_times_s[-1] - self.token_times_s[0]) / max(1, tokens - 1)

    @property
    def itl_s(self) -> list[float]:
        """Gaps between tokens; 0 between tokens that came together in one chunk."""
        return [later - earlier for earlier, later in itertools.pairwise(self.token_times_s)]

    @property
    def end_s(self) -> float | None:
        """Time to the last token."""
        return self.token_times_s[-1] if self.token_times_s else None


def read_stream(
    lines: Iterable[bytes | str], start_s: float, clock: Callable[[], float] = time.perf_counter
) -> StreamTiming:
    """Follow a stream to its end.

    Args:
        lines: lines of the response body, as they arrive.
        start_s: clock() when the request was sent.

    Raises:
        StreamError: an error event, an event that is not JSON, or an end without [DONE].
    """
    timing = StreamTiming()
    for raw in lines:
        line = raw.decode() if isinstance(raw, bytes) else raw
        if not line.startswith("data:"):
            continue
        data = line[len("data:") :].strip()
        if data == "[DONE]":
            return timing
        try:
            event: dict[str, Any] = json.loads(data)
        except ValueError as error:
            raise StreamError(f"an event is not JSON: {data[:80]!r}") from error
        if "error" in event:
            raise StreamError(str(event["error"].get("message", event["error"])))
        _take(event, timing, clock() - start_s)
    raise StreamError("the stream ended without [DONE]")


def _take(event: dict[str, Any], timing: StreamTiming, now_s: float) -> None:
    if usage := event.get("usage"):
        timing.completion_tokens = usage.get("completion_tokens")
        timing.prompt_tokens = usage.get("prompt_tokens")
    for choice in event.get("choices") or []:
        delta = choice.get("delta") or {}
        piece = choice.get("text") or delta.get("content")
        timing.text += piece or ""
        timing.finish_reason = choice.get("finish_reason") or timing.finish_reason
        # A token may be half a character, and then carries no text; a role alone is no token.
        if piece or choice.get("text") is not None or (delta and "role" not in delta):
            timing.token_times_s.append(now_s)
