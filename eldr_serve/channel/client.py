"""The ingress replica's end: calls to one engine replica over one connection."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from eldr_serve.channel.frames import MAX_FRAME_BYTES, VERSION, BrokenFrame, Kind, frame
from eldr_serve.channel.peer import Peer

MAX_UNREAD_BYTES = 2**20  # of one stream whose client does not read
SILENT_S = 2.5  # an engine that has said nothing for so long is gone
_CONNECT_S = 5.0


class ChannelLost(ConnectionError):  # noqa: N818
    """The connection ended, or could not be made."""


class SlowReader(RuntimeError):  # noqa: N818
    """A stream's client reads too slowly; the stream was cancelled."""


class CallLate(TimeoutError):  # noqa: N818
    """The engine has sent nothing for too long, though its channel is open; the call was cancelled."""


class CallFailed(RuntimeError):  # noqa: N818
    """The engine's own word that a call has failed; raised where it says so, and where it is heard.

    Attributes:
        status: as of HTTP; below 500 the request is at fault.
        body: what tells it, for the client.
    """

    def __init__(self, status: int, body: bytes) -> None:
        try:
            message = msgspec.json.decode(body)["error"]["message"]  # as OpenAI's API words it
        except (msgspec.DecodeError, KeyError, TypeError):
            message = body[:500].decode(errors="replace")
        super().__init__(f"{message}")
        self.status = status
        self.body = body


@dataclass(frozen=True)
class Chunk:
    """What of an answer has come since it was last looked at."""

    payload: bytes
    tokens: int = 0  # generated tokens in it
    ids: bytes = b""  # uint32 ids of those tokens that came with theirs


class Call:
    """One call and the answer received so far.

    Attributes:
        about: the engine's report on its part of the call, received with the end of the answer.
        begun_at: start time on the event loop's clock, s.
    """

    def __init__(self, channel: Channel, number: int) -> None:
        self._channel = channel
        self._number = number
        self._unread: list[bytes] = []
        self._unread_bytes = self._tokens = 0
        self._ids: list[bytes] = []
        self._over = False
        self._error: Exception | None = None
        self._news = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self.begun_at = self._loop.time()
        self._heard_at: float | None = None
        self._timer: asyncio.TimerHandle | None = None
        self.about: dict[str, Any] = {}
        self.on_overflow: Callable[[], None] = lambda: None  # told once, when the call is cancelled for that

    async def read(self) -> Chunk | None:
        """All that has come and is unread, or, if there is nothing, what comes next; None at the end.

        Raises:
            CallFailed: the engine says so.
            ChannelLost: the connection was lost; nobody knows what became of the call.
            SlowReader: this was called too rarely.
            CallLate: see `expect`.
        """
        while not self._unread:
            if self._error is not None and (self._over or isinstance(self._error, CallLate)):
                raise self._error
            if self._over:
                return None
            self._news.clear()
            await self._news.wait()
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
            min(first_s, gap_s), self._look, first_s, gap_s, since or (lambda: now)
        )

    def _look(self, first_s: float, gap_s: float, since: Callable[[], float]) -> None:
        now = self._loop.time()
        until = since() + first_s if self._heard_at is None else self._heard_at + gap_s
        if until > now:
            self._timer = self._loop.call_at(min(until, now + gap_s), self._look, first_s, gap_s, since)
            return
        what = "for its first token" if self._heard_at is None else "between two tokens"
        self._error = self._error or CallLate(f"too long {what}")
        self.cancel()
        self._news.set()

    def cancel(self) -> None:
        """Tell the engine to stop; calling it again, or after the end, does nothing."""
        if not self._over:
            self._channel.say(frame(Kind.CANCEL, self._number))

    async def end(self) -> None:
        """Wait until the engine no longer works for the call; ChannelLost if nobody knows."""
        while not self._over:
            self._unread, self._unread_bytes = [], 0
            self._news.clear()
            await self._news.wait()
        if isinstance(self._error, ChannelLost):
            raise self._error

    # -- for the channel -------------------------------------------------------------------------

    def data(self, payload: bytes, tokens: int, ids: bytes = b"") -> None:
        """A part of the answer has come, perhaps with its tokens' ids (uint32)."""
        if self._error is not None:
            return
        self._heard_at = self._loop.time()
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
        self._news.set()

    def over(self, error: Exception | None) -> None:
        """Nothing more will come."""
        self._over = True
        if self._timer is not None:
            self._timer.cancel()
        self._error = self._error or error
        self._news.set()


class Channel(Peer):
    """A connection to one engine replica. Made by `connect`.

    Attributes:
        on_report: callback for each status report of the engine.
    """

    def __init__(self, secret: str, changed: Callable[[], None]) -> None:
        super().__init__(MAX_FRAME_BYTES, silent_s=SILENT_S)
        self._secret = secret
        self._changed = changed
        self._numbers = itertools.count(1)
        self._calls: dict[int, Call] = {}
        self.welcome: asyncio.Future[None] = self._loop.create_future()
        self.closed: asyncio.Future[str] = self._loop.create_future()  # with the reason
        self._leaving = False
        self.on_report: Callable[[dict[str, Any]], None] = lambda report: None

    @classmethod
    async def connect(
        cls, host: str, port: int, secret: str, changed: Callable[[], None] = lambda: None
    ) -> Channel:
        """Connect and say hello; ChannelLost if nobody answers or takes the secret.

        Args:
            changed: called when the channel is not `open` any more.
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
        """The engine takes calls."""
        return not (self._leaving or self.closed.done())

    @property
    def in_flight(self) -> int:
        """Open calls."""
        return len(self._calls)

    @property
    def oldest_s(self) -> float:
        """Return the age of the oldest open call, s; 0 without one."""
        oldest = next(iter(self._calls.values()), None)
        return self._loop.time() - oldest.begun_at if oldest is not None else 0.0

    def call(self, method: str, header: dict[str, Any], body: bytes = b"") -> Call:
        """Begin a call; `header` is of what msgpack can carry. ChannelLost if the connection is over."""
        if self.closed.done():
            raise ChannelLost(self.closed.result())
        number = next(self._numbers) % 2**32
        call = self._calls[number] = Call(self, number)
        self.say(frame(Kind.CALL, number, msgspec.msgpack.encode((method, header, body))))
        return call

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.say(frame(Kind.HELLO, 0, bytes([VERSION]) + self._secret.encode()))

    def pinged(self, payload: bytes) -> None:
        if payload:
            self.on_report(_about(payload))

    def heard(self, kind: int, call: int, tokens: int, payload: bytes) -> None:
        if kind == Kind.DATA:
            if call in self._calls:
                self._calls[call].data(payload, tokens)
        elif kind == Kind.TOKENS:
            if len(payload) < 4 * tokens:
                raise BrokenFrame(f"{tokens} tokens in {len(payload)} bytes")
            if call in self._calls:
                self._calls[call].data(payload[4 * tokens :], tokens, payload[: 4 * tokens])
        elif kind in (Kind.END, Kind.FAIL):
            about = _about(payload) if kind == Kind.END and payload else {}
            found = self._calls.pop(call, None)
            if found is not None:
                found.about = about
                found.over(CallFailed(tokens, payload) if kind == Kind.FAIL else None)
        elif kind == Kind.WELCOME:
            if not self.welcome.done():
                self.welcome.set_result(None)
        elif kind == Kind.LEAVING:
            self._leaving = True
            self._changed()
        else:
            raise BrokenFrame(f"a frame of kind {kind}")

    def ended(self, reason: str) -> None:
        self.closed.set_result(reason)
        if not self.welcome.done():
            self.welcome.set_exception(ChannelLost(reason))
        calls, self._calls = self._calls, {}
        for call in calls.values():
            call.over(ChannelLost(reason))
        self._changed()


def _about(payload: bytes) -> dict[str, Any]:
    try:
        return _ABOUT.decode(payload)
    except msgspec.DecodeError as error:
        raise BrokenFrame(f"a malformed end: {error}") from error


_ABOUT = msgspec.msgpack.Decoder(dict[str, Any])
