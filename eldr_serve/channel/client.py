"""The ingress replica's end of a channel: calls to one engine replica over one connection."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from eldr_serve.channel.frames import MAX_FRAME_BYTES, VERSION, BrokenFrame, Kind, frame
from eldr_serve.channel.peer import Peer

MAX_UNREAD_BYTES = 2**20  # limit per stream; protects against clients that do not read
SILENT_S = 2.5  # an engine that has sent nothing for this long is lost
_CONNECT_S = 5.0


class ChannelLost(ConnectionError):  # noqa: N818
    """The connection was lost or could not be made."""


class SlowReader(RuntimeError):  # noqa: N818
    """The client of a stream reads too slowly; the stream was cancelled."""


class CallLate(TimeoutError):  # noqa: N818
    """The engine sent nothing for too long on an open channel; the call was cancelled."""


class CallFailed(RuntimeError):  # noqa: N818
    """The engine reports that a call has failed; raised both in the engine and in the ingress.

    Attributes:
        status: HTTP status; below 500 the request is at fault.
        body: response body for the client.
    """

    def __init__(self, status: int, body: bytes) -> None:
        try:
            message = msgspec.json.decode(body)["error"]["message"]  # OpenAI's error format
        except (msgspec.DecodeError, KeyError, TypeError):
            message = body[:500].decode(errors="replace")
        super().__init__(f"{message}")
        self.status = status
        self.body = body


@dataclass(frozen=True)
class Chunk:
    """The part of an answer received since the last read."""

    payload: bytes
    tokens: int = 0  # number of generated tokens in it
    ids: bytes = b""  # uint32 ids of the tokens that were sent with ids


class Call:
    """One call and the answer received so far.

    Attributes:
        about: the engine's report on its part of the call, received with the end of the answer.
        begun_at: start time on the event loop's clock, s.
        on_overflow: callback, called once if the call is cancelled because its client reads too slowly.
    """

    def __init__(self, channel: Channel, number: int) -> None:
        self._channel = channel
        self._number = number
        self._unread: list[bytes] = []
        self._unread_bytes = self._tokens = 0
        self._ids: list[bytes] = []
        self._finished = False
        self._error: Exception | None = None
        self._changed_event = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self.begun_at = self._loop.time()
        self._received_at: float | None = None
        self._timer: asyncio.TimerHandle | None = None
        self.about: dict[str, Any] = {}
        self.on_overflow: Callable[[], None] = lambda: None

    async def read(self) -> Chunk | None:
        """Return everything unread, wait for more if there is nothing, or return None at the end.

        Raises:
            CallFailed: the engine reports a failure.
            ChannelLost: the connection was lost; the state of the call is unknown.
            SlowReader: `read` was called too rarely.
            CallLate: see `expect`.
        """
        while not self._unread:
            if self._error is not None and (self._finished or isinstance(self._error, CallLate)):
                raise self._error
            if self._finished:
                return None
            self._changed_event.clear()
            await self._changed_event.wait()
        chunk = Chunk(b"".join(self._unread), self._tokens, b"".join(self._ids))
        self._unread, self._ids, self._unread_bytes, self._tokens = [], [], 0, 0
        return chunk

    def expect(self, first_s: float, gap_s: float, since: Callable[[], float] | None = None) -> None:
        """Fail the call if no part arrives for `first_s`, or no further part for `gap_s`.

        The limits are checked periodically, not with each part of the answer.

        Args:
            since: returns the time, on the loop's clock, from which `first_s` counts. It moves forward
                while the engine answers other calls first. By default `first_s` counts from now.
        """
        now = self._loop.time()
        self._timer = self._loop.call_later(
            min(first_s, gap_s), self._check_time, first_s, gap_s, since or (lambda: now)
        )

    def _check_time(self, first_s: float, gap_s: float, since: Callable[[], float]) -> None:
        now = self._loop.time()
        until = since() + first_s if self._received_at is None else self._received_at + gap_s
        if until > now:
            self._timer = self._loop.call_at(min(until, now + gap_s), self._check_time, first_s, gap_s, since)
            return
        what = "for its first token" if self._received_at is None else "between two tokens"
        self._error = self._error or CallLate(f"too long {what}")
        self.cancel()
        self._changed_event.set()

    def cancel(self) -> None:
        """Tell the engine to stop; do nothing if the call has ended."""
        if not self._finished:
            self._channel.send(frame(Kind.CANCEL, self._number))

    async def end(self) -> None:
        """Wait until the engine no longer works on the call; raise ChannelLost if that is unknown."""
        while not self._finished:
            self._unread, self._unread_bytes = [], 0
            self._changed_event.clear()
            await self._changed_event.wait()
        if isinstance(self._error, ChannelLost):
            raise self._error

    # -- called by the channel -------------------------------------------------------------------

    def feed(self, payload: bytes, tokens: int, ids: bytes = b"") -> None:
        """Add a received part of the answer; `ids`: uint32 token ids, may be empty."""
        if self._error is not None:
            return
        self._received_at = self._loop.time()
        if self._unread and self._unread_bytes + len(payload) > MAX_UNREAD_BYTES:
            self._error = SlowReader(f"{self._unread_bytes} bytes of a stream are unread")
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

    def finish(self, error: Exception | None) -> None:
        """End the call; nothing more will arrive."""
        self._finished = True
        if self._timer is not None:
            self._timer.cancel()
        self._error = self._error or error
        self._changed_event.set()


class OpenCall:
    """A call that stays open until it is closed or its channel is lost; messages go both ways meanwhile.

    Args:
        on_message: callback for each message, within the turn of the event loop that reads it.
        on_failed: callback with CallFailed or ChannelLost, if the call ends and this side has not closed it.

    Attributes:
        begun_at: start time on the event loop's clock, s.
    """

    __slots__ = ("_channel", "_number", "_on_failed", "_on_message", "begun_at")

    def __init__(
        self,
        channel: Channel,
        number: int,
        on_message: Callable[[bytes], None],
        on_failed: Callable[[Exception], None],
    ) -> None:
        self._channel, self._number = channel, number
        self._on_message, self._on_failed = on_message, on_failed
        self.begun_at = channel.now()

    def note(self, payload: bytes = b"", tokens: int = 0) -> None:
        """Send a message about the call, and the number of tokens generated so far."""
        self._channel.send(frame(Kind.NOTE, self._number, payload, tokens))

    def close(self, tokens: int = 0) -> None:
        """End the call with its final number of tokens; no callback follows."""
        self._channel.close_call(self._number, tokens)

    # -- called by the channel -------------------------------------------------------------------

    def feed(self, payload: bytes, tokens: int, ids: bytes = b"") -> None:
        """Pass a message on."""
        self._on_message(payload)

    def finish(self, error: Exception | None) -> None:
        """Report the end of the call."""
        self._on_failed(error or CallFailed(500, b"the other end has closed the call"))


class Channel(Peer):
    """A connection to one engine replica; create it with `connect`.

    Attributes:
        on_report: callback for each status report of the engine.
    """

    def __init__(self, secret: str, changed: Callable[[], None]) -> None:
        super().__init__(MAX_FRAME_BYTES, silent_s=SILENT_S)
        self._secret = secret
        self._changed = changed
        self._numbers = itertools.count(1)
        self._calls: dict[int, Call | OpenCall] = {}
        self.welcome: asyncio.Future[None] = self._loop.create_future()
        self.closed: asyncio.Future[str] = self._loop.create_future()  # result: the reason
        self._leaving = False
        self.on_report: Callable[[dict[str, Any]], None] = lambda report: None

    @classmethod
    async def connect(
        cls, host: str, port: int, secret: str, changed: Callable[[], None] = lambda: None
    ) -> Channel:
        """Connect and authenticate; raise ChannelLost if there is no answer or the secret is refused.

        Args:
            changed: callback for when the channel is no longer `open`.
        """
        channel: Channel | None = None
        try:
            async with asyncio.timeout(_CONNECT_S):
                _, channel = await asyncio.get_running_loop().create_connection(
                    lambda: cls(secret, changed), host, port
                )
                await channel.welcome
        except (OSError, TimeoutError) as error:
            if channel is not None:
                channel.close("it does not answer")
            raise ChannelLost(f"no channel to {host}:{port}: {error or 'it does not answer'}") from error
        return channel

    @property
    def open(self) -> bool:
        """Return whether the engine accepts calls."""
        return not (self._leaving or self.closed.done())

    @property
    def in_flight(self) -> int:
        """Return the number of open calls."""
        return len(self._calls)

    @property
    def oldest_s(self) -> float:
        """Return the age of the oldest open call, s; 0 if there is none."""
        oldest = next(iter(self._calls.values()), None)
        return self._loop.time() - oldest.begun_at if oldest is not None else 0.0

    def call(self, method: str, header: dict[str, Any], body: bytes = b"") -> Call:
        """Begin a call; raise ChannelLost if the connection is closed.

        Args:
            header: values that msgpack can encode.
        """
        number = self._next_number()
        call = self._calls[number] = Call(self, number)
        self.send(frame(Kind.CALL, number, _encode((method, header, body))))
        return call

    def open_call(
        self,
        method: str,
        body: bytes,
        on_message: Callable[[bytes], None],
        on_failed: Callable[[Exception], None],
    ) -> OpenCall:
        """Begin a call that stays open, see OpenCall; raise ChannelLost if the connection is closed."""
        number = self._next_number()
        call = self._calls[number] = OpenCall(self, number, on_message, on_failed)
        self.send(frame(Kind.CALL, number, _encode((method, {}, body))))
        return call

    def close_call(self, number: int, tokens: int) -> None:
        """End an open call; do nothing if it has ended."""
        if self._calls.pop(number, None) is not None:
            self.send(frame(Kind.CANCEL, number, tokens=tokens))

    def now(self) -> float:
        """Return the time on the event loop's clock, s."""
        return self._loop.time()

    def _next_number(self) -> int:
        if self.closed.done():
            raise ChannelLost(self.closed.result())
        return next(self._numbers) % 2**32

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.send(frame(Kind.HELLO, 0, bytes([VERSION]) + self._secret.encode()))

    def ping_received(self, payload: bytes) -> None:
        if payload:
            self.on_report(_decode_report(payload))

    def frame_received(self, kind: int, call: int, tokens: int, payload: bytes) -> None:
        if kind == Kind.DATA:
            if call in self._calls:
                self._calls[call].feed(payload, tokens)
        elif kind == Kind.TOKENS:
            if len(payload) < 4 * tokens:
                raise BrokenFrame(f"{tokens} tokens in {len(payload)} bytes")
            if call in self._calls:
                self._calls[call].feed(payload[4 * tokens :], tokens, payload[: 4 * tokens])
        elif kind in (Kind.END, Kind.FAIL):
            about = _decode_report(payload) if kind == Kind.END and payload else {}
            found = self._calls.pop(call, None)
            if found is not None:
                if isinstance(found, Call):
                    found.about = about
                found.finish(CallFailed(tokens, payload) if kind == Kind.FAIL else None)
        elif kind == Kind.WELCOME:
            if not self.welcome.done():
                self.welcome.set_result(None)
        elif kind == Kind.LEAVING:
            self._leaving = True
            self._changed()
        else:
            raise BrokenFrame(f"a frame of kind {kind}")

    def on_closed(self, reason: str) -> None:
        self.closed.set_result(reason)
        if not self.welcome.done():
            self.welcome.set_exception(ChannelLost(reason))
        calls, self._calls = self._calls, {}
        for call in calls.values():
            call.finish(ChannelLost(reason))
        self._changed()


def _decode_report(payload: bytes) -> dict[str, Any]:
    try:
        return _REPORT.decode(payload)
    except msgspec.DecodeError as error:
        raise BrokenFrame(f"a malformed end: {error}") from error


_encode = msgspec.msgpack.Encoder().encode
_REPORT = msgspec.msgpack.Decoder(dict[str, Any])
