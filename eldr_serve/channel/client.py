"""The caller's end of a channel: calls of an ingress to one engine replica or to the router."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from typing import Any

import msgspec

from eldr_serve.channel.calls import Call, OpenCall
from eldr_serve.channel.errors import CallFailedError, ChannelLostError
from eldr_serve.channel.frames import MAX_FRAME_BYTES, VERSION, BrokenFrameError, Kind, frame
from eldr_serve.channel.peer import Peer

SILENT_S = 2.5  # a server that has sent nothing for this long counts as lost
_CONNECT_S = 5.0


class Channel(Peer):
    """A connection to one engine replica or to the router; create it with `connect`.

    Attributes:
        on_report: callback for each status report of the server.
        welcome: done when the server has accepted the secret; fails with ChannelLostError.
        closed: done when the connection is closed; its result is the reason.
    """

    def __init__(self, secret: str, on_change: Callable[[], None]) -> None:
        super().__init__(MAX_FRAME_BYTES, silent_s=SILENT_S)
        self._secret = secret
        self._on_change = on_change
        self._numbers = itertools.count(1)
        self._calls: dict[int, Call | OpenCall] = {}
        # Number of calls of each method and group, without OpenCalls.
        self._num_calls: Counter[tuple[str, Hashable]] = Counter()
        self.welcome: asyncio.Future[None] = self._loop.create_future()
        self.closed: asyncio.Future[str] = self._loop.create_future()
        self._silent = False
        self.on_report: Callable[[dict[str, Any]], None] = lambda report: None

    @classmethod
    async def connect(
        cls, host: str, port: int, secret: str, on_change: Callable[[], None] = lambda: None
    ) -> Channel:
        """Connect and authenticate; raise ChannelLostError if there is no answer or the secret is refused.

        Args:
            on_change: callback for when the channel is no longer open.
        """
        channel: Channel | None = None
        try:
            async with asyncio.timeout(_CONNECT_S):
                _, channel = await asyncio.get_running_loop().create_connection(
                    lambda: cls(secret, on_change), host, port
                )
                await channel.welcome
        except BaseException as error:
            if channel is not None:
                channel.close("the server does not answer")
            if not isinstance(error, OSError | TimeoutError):
                raise
            reason = str(error) or "the server does not answer"
            raise ChannelLostError(f"no channel to {host}:{port}: {reason}") from error
        return channel

    @property
    def is_open(self) -> bool:
        """Return whether the server accepts calls."""
        return not (self.is_leaving or self.closed.done())

    @property
    def in_flight(self) -> int:
        """Return the number of open calls."""
        return len(self._calls)

    def count_calls(self, methods: Iterable[str], group: Hashable = None) -> int:
        """Return the number of open calls of these methods in a group."""
        return sum(self._num_calls[method, group] for method in methods)

    @property
    def oldest_s(self) -> float:
        """Return the age of the oldest open call in seconds; 0 if there is none."""
        oldest = next(iter(self._calls.values()), None)
        return self._loop.time() - oldest.started_at_s if oldest is not None else 0.0

    def call(
        self,
        method: str,
        header: msgspec.Struct | dict[str, Any],
        body: bytes = b"",
        group: Hashable = None,
    ) -> Call:
        """Begin a call; raise ChannelLostError if the connection is closed.

        Args:
            header: values that msgpack can encode; the server's handler gets a dict.
            group: group in which the call is counted.
        """
        number = self._next_number()
        call = self._calls[number] = Call(self, number, method, group)
        self._num_calls[method, group] += 1
        self.send(frame(Kind.CALL, number, _encode((method, header, body))))
        return call

    def open_call(
        self,
        method: str,
        body: bytes,
        on_message: Callable[[bytes], None],
        on_failed: Callable[[Exception], None],
    ) -> OpenCall:
        """Begin a call that stays open, see OpenCall; raise ChannelLostError if the connection is closed."""
        number = self._next_number()
        call = self._calls[number] = OpenCall(self, number, self.close_call, on_message, on_failed)
        self.send(frame(Kind.CALL, number, _encode((method, {}, body))))
        return call

    def close_call(self, number: int, tokens: int) -> None:
        """End an open call; do nothing if it has ended."""
        if self._calls.pop(number, None) is not None:
            self.send(frame(Kind.CANCEL, number, tokens=tokens))

    def _next_number(self) -> int:
        if self.closed.done():
            raise ChannelLostError(self.closed.result())
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
                raise BrokenFrameError(f"{tokens} tokens in {len(payload)} bytes")
            if call in self._calls:
                self._calls[call].feed(payload[4 * tokens :], tokens, payload[: 4 * tokens])
        elif kind in (Kind.END, Kind.FAIL):
            report = _decode_report(payload) if kind == Kind.END and payload else {}
            ended_call = self._calls.pop(call, None)
            if ended_call is not None:
                if isinstance(ended_call, Call):
                    self._num_calls[ended_call.method, ended_call.group] -= 1
                    ended_call.engine_report = report
                ended_call.on_ended(CallFailedError(tokens, payload) if kind == Kind.FAIL else None)
        elif kind == Kind.WELCOME:
            if not self.welcome.done():
                self.welcome.set_result(None)
        elif kind == Kind.LEAVING:
            self.is_leaving = True
            self._on_change()
        else:
            raise BrokenFrameError(f"a frame of the unexpected kind {kind}")

    def abort(self, error: BaseException | None) -> None:
        self._silent = isinstance(error, TimeoutError)
        super().abort(error)

    def on_closed(self, reason: str) -> None:
        self.closed.set_result(reason)
        if not self.welcome.done():
            self.welcome.set_exception(ChannelLostError(reason))
        calls, self._calls = self._calls, {}
        self._num_calls.clear()
        for call in calls.values():
            call.on_ended(ChannelLostError(reason, silent=self._silent))
        self._on_change()


def _decode_report(payload: bytes) -> dict[str, Any]:
    try:
        return _REPORT.decode(payload)
    except msgspec.DecodeError as error:
        raise BrokenFrameError(f"a malformed report: {error}") from error


_encode = msgspec.msgpack.Encoder().encode
_REPORT = msgspec.msgpack.Decoder(dict[str, Any])
