"""The caller's end of calls over a channel: one with a reply, and one that stays open."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

from eldr_serve.channel.errors import CallFailedError, CallTimeoutError, ChannelLostError, SlowReaderError
from eldr_serve.channel.frames import Kind, frame
from eldr_serve.channel.peer import Peer

MAX_UNREAD_BYTES = 2**20  # limit per stream, which protects against clients that do not read


@dataclass(frozen=True)
class Chunk:
    """The part of a reply received since the last read."""

    payload: bytes
    num_tokens: int = 0  # generated tokens in the payload
    ids: bytes = b""  # uint32 ids of the tokens that were sent with ids


class Call:
    """One call and the part of its reply received so far.

    Attributes:
        method: name of the called method.
        group: the group in which the caller counts the call; see Channel.count_calls.
        engine_report: the engine's report on its part of the call, received with the end of the reply.
        started_at_s: start time in seconds on the event loop's clock.
        on_overflow: callback, called once if the call is cancelled because its client reads too slowly.
    """

    def __init__(self, channel: Peer, number: int, method: str, group: Hashable = None) -> None:
        self.method = method
        self.group = group
        self._channel = channel
        self._number = number
        self._unread: list[bytes] = []
        self._unread_bytes = self._tokens = 0
        self._ids: list[bytes] = []
        self._finished = self._timed_out = False
        self._error: Exception | None = None
        self._changed_event = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self.started_at_s = self._loop.time()
        self._received_at_s: float | None = None
        self._timer: asyncio.TimerHandle | None = None
        self.engine_report: dict[str, Any] = {}
        self.on_overflow: Callable[[], None] = lambda: None

    async def read(self) -> Chunk | None:
        """Return everything unread, wait for more if there is nothing, or return None at the end.

        Raises:
            CallFailedError: the engine reports a failure.
            ChannelLostError: the connection was lost; the state of the call is unknown.
            SlowReaderError: `read` was called too rarely.
            CallTimeoutError: see `set_timeouts`.
        """
        while not self._unread:
            if self._error is not None and (self._finished or self._timed_out):
                raise self._error
            if self._finished:
                return None
            self._changed_event.clear()
            await self._changed_event.wait()
        chunk = Chunk(b"".join(self._unread), self._tokens, b"".join(self._ids))
        self._unread, self._ids, self._unread_bytes, self._tokens = [], [], 0, 0
        return chunk

    def set_timeouts(
        self, first_part_s: float, next_part_s: float, since: Callable[[], float] | None = None
    ) -> None:
        """Fail the call if no part arrives for `first_part_s`, or no further part for `next_part_s`.

        The limits are checked periodically, not with each part of the reply.

        Args:
            since: returns the time, on the loop's clock, from which `first_part_s` counts. That time moves
                forward while the engine answers other calls first. By default `first_part_s` counts from now.
        """
        now_s = self._loop.time()
        self._timer = self._loop.call_later(
            min(first_part_s, next_part_s),
            self._check_time,
            first_part_s,
            next_part_s,
            since or (lambda: now_s),
        )

    def _check_time(self, first_part_s: float, next_part_s: float, since: Callable[[], float]) -> None:
        now_s = self._loop.time()
        due_at_s = (
            since() + first_part_s if self._received_at_s is None else self._received_at_s + next_part_s
        )
        if due_at_s > now_s:
            self._timer = self._loop.call_at(
                min(due_at_s, now_s + next_part_s), self._check_time, first_part_s, next_part_s, since
            )
            return
        what = (
            f"nothing for {first_part_s:g} s"
            if self._received_at_s is None
            else f"nothing more for {next_part_s:g} s"
        )
        self._timed_out = True  # even a slow reader waits no longer for the engine to stop
        self._error = self._error or CallTimeoutError(f"the engine sent {what}")
        self.cancel()
        self._changed_event.set()

    @property
    def is_leaving(self) -> bool:
        """Return whether the engine accepts no new calls; this call may continue."""
        return self._channel.is_leaving

    def cancel(self) -> None:
        """Tell the engine to stop; do nothing if the call has ended."""
        if not self._finished:
            self._channel.send(frame(Kind.CANCEL, self._number))

    async def wait_until_ended(self) -> None:
        """Wait until the engine no longer works on the call; raise ChannelLostError if that is unknown."""
        while not self._finished:
            self._unread, self._unread_bytes = [], 0
            self._changed_event.clear()
            await self._changed_event.wait()
        if isinstance(self._error, ChannelLostError):
            raise self._error

    # -- called by the channel -------------------------------------------------------------------

    def feed(self, payload: bytes, tokens: int, ids: bytes = b"") -> None:
        """Add a received part of the reply; `ids` holds the uint32 ids of its tokens, or nothing."""
        if self._error is not None:
            return
        self._received_at_s = self._loop.time()
        if self._unread and self._unread_bytes + len(payload) > MAX_UNREAD_BYTES:
            self._error = SlowReaderError(f"{self._unread_bytes} bytes of a stream are unread")
            self._unread, self._ids = [], []
            self.cancel()
            self.on_overflow()
            return
        self._unread.append(payload)
        self._unread_bytes += len(payload)
        self._tokens += tokens
        if ids:
            self._ids.append(ids)
        self._changed_event.set()

    def on_ended(self, error: Exception | None) -> None:
        """End the call; nothing more will arrive."""
        self._finished = True
        if self._timer is not None:
            self._timer.cancel()
        self._error = self._error or error
        self._changed_event.set()


class OpenCall:
    """A call that carries messages both ways until it is closed or its channel is lost.

    Args:
        channel: the connection, which takes messages.
        close: function that closes a call; it takes the call's number and final number of tokens.
        on_message: callback for each message; it runs in the event loop's iteration that reads the message.
        on_failed: callback with CallFailedError or ChannelLostError if the call ends early.

    Attributes:
        started_at_s: start time in seconds on the event loop's clock.
    """

    __slots__ = ("_channel", "_close", "_number", "_on_failed", "_on_message", "started_at_s")

    def __init__(
        self,
        channel: Peer,
        number: int,
        close: Callable[[int, int], None],
        on_message: Callable[[bytes], None],
        on_failed: Callable[[Exception], None],
    ) -> None:
        self._channel, self._number, self._close = channel, number, close
        self._on_message, self._on_failed = on_message, on_failed
        self.started_at_s = asyncio.get_running_loop().time()

    def note(self, payload: bytes = b"", tokens: int = 0) -> None:
        """Send a message about the call, and the number of tokens generated so far."""
        self._channel.send(frame(Kind.NOTE, self._number, payload, tokens))

    def close(self, tokens: int = 0) -> None:
        """End the call with its final number of tokens; no callback follows."""
        self._close(self._number, tokens)

    # -- called by the channel -------------------------------------------------------------------

    def feed(self, payload: bytes, tokens: int, ids: bytes = b"") -> None:
        """Pass a message to the callback."""
        self._on_message(payload)

    def on_ended(self, error: Exception | None) -> None:
        """Report the end of the call."""
        self._on_failed(error or CallFailedError(500, b"the other end has closed the call"))
