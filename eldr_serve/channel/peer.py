"""The part that both ends of a channel share: batched writes, keepalive pings and closing."""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from typing import cast

from eldr_serve.channel.frames import PING_S, BrokenFrameError, Frames, Kind, frame

logger = logging.getLogger(__name__)

_PING = frame(Kind.PING)


class Peer(asyncio.Protocol, ABC):
    """One end of a connection.

    Args:
        max_bytes: maximum size of a frame's payload, see Frames.
        silent_s: seconds without data after which the other end counts as lost.

    Attributes:
        name: address of the other end, for logs.
        is_close_logged: whether the log already contains the reason for the closed connection.
        is_leaving: whether the other end accepts no new calls; open answers should move to another engine.
    """

    def __init__(self, max_bytes: int, *, silent_s: float) -> None:
        self._frames = Frames(max_bytes)
        self._silent_s = silent_s
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._unsent: list[bytes] = []
        self._received_at_s = self._due_at_s = self._loop.time()
        self._timer: asyncio.TimerHandle | None = None
        self.name = "?"
        self.is_close_logged = self.is_leaving = False

    # -- implemented or called by the two ends ---------------------------------------------------

    @abstractmethod
    def frame_received(self, kind: int, call: int, tokens: int, payload: bytes) -> None:
        """Process a frame other than a ping; raise BrokenFrameError if it violates the protocol."""

    @abstractmethod
    def on_closed(self, reason: str) -> None:
        """Process the end of the connection."""

    def ping(self) -> bytes:
        """Return a keepalive frame."""
        return _PING

    def ping_received(self, payload: bytes) -> None:
        """Process the payload of a ping from the other end."""

    def send(self, *parts: bytes) -> None:
        """Send bytes; all writes of one iteration of the event loop are sent together."""
        if not self._unsent:
            self._loop.call_soon(self._flush)
        self._unsent += parts

    @property
    def unsent_bytes(self) -> int:
        """Return the size of the write buffer."""
        return self._transport.get_write_buffer_size() if self._transport else 0

    def close(self, reason: str) -> None:
        """Close the connection at once; unsent bytes are lost."""
        if self._transport is not None:
            transport, self._transport = self._transport, None
            if self._timer is not None:
                self._timer.cancel()
            transport.abort()
            self.on_closed(reason)

    def abort(self, error: BaseException | None) -> None:
        """Close the connection because of an error of the peer, and log it."""
        if self._transport is not None:
            logger.warning("a channel with %s is closed: %s", self.name, error)
            self.is_close_logged = True
            self.close(str(error))

    # -- asyncio.Protocol ------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's class does not inherit asyncio's
        address = transport.get_extra_info("peername")
        self.name = f"{address[0]}:{address[1]}" if address else "?"
        self._tick_at(self._loop.time() + PING_S)

    def data_received(self, data: bytes) -> None:
        self._received_at_s = self._loop.time()
        try:
            for kind, call, tokens, payload in self._frames.feed(data):
                if self._transport is None:  # processing the previous frame has closed the connection
                    return
                if kind == Kind.PING:
                    self.ping_received(payload)
                else:
                    self.frame_received(kind, call, tokens, payload)
        except BrokenFrameError as error:
            self.abort(error)
        except Exception as error:  # asyncio would abort the transport, and the reason would be unknown
            logger.exception("a frame from %s cannot be processed, so the channel is closed", self.name)
            self.is_close_logged = True
            self.close(f"a frame cannot be processed: {error!r}")

    def connection_lost(self, error: Exception | None) -> None:
        reason = f"the connection was lost: {error}" if error else "the other end has closed it"
        if self._frames.incomplete:
            self.abort(BrokenFrameError(f"{reason}, in the middle of a frame"))
        else:
            self.close(reason)

    def _flush(self) -> None:
        if self._transport is not None:
            self._transport.writelines(self._unsent)
        self._unsent = []

    def _tick(self) -> None:
        now_s = self._loop.time()
        if now_s - self._due_at_s > PING_S:  # this process was late, not the other end
            self._received_at_s = now_s
        lost_at_s = self._received_at_s + self._silent_s
        if now_s >= lost_at_s:
            self.abort(TimeoutError(f"silent for {self._silent_s:g} s"))
            return
        self.send(self.ping())
        # Tick no later than the deadline. Schedule the tick by absolute time: rounding could shrink each
        # further delay to 0.
        self._tick_at(min(now_s + PING_S, lost_at_s))

    def _tick_at(self, due_at_s: float) -> None:
        self._due_at_s = due_at_s
        self._timer = self._loop.call_at(due_at_s, self._tick)
