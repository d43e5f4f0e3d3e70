"""What both ends of a channel have: one write a turn of the loop, pings, and an end."""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from typing import cast

from eldr_serve.channel.frames import PING_S, BrokenFrame, Frames, Kind, frame

logger = logging.getLogger(__name__)

_PING = frame(Kind.PING)


class Peer(asyncio.Protocol, ABC):
    """One end of a connection.

    Args:
        max_bytes: of a frame's payload, see Frames.
        silent_s: the other end is gone if it has said nothing for so long, s.
    """

    def __init__(self, max_bytes: int, *, silent_s: float) -> None:
        self._frames = Frames(max_bytes)
        self._silent_s = silent_s
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._out: list[bytes] = []
        self._heard_at = self._due = self._loop.time()
        self._timer: asyncio.TimerHandle | None = None
        self.name = "?"
        self.told = False  # the log has a line of why the connection is over

    # -- for the two ends ------------------------------------------------------------------------

    @abstractmethod
    def heard(self, kind: int, call: int, tokens: int, payload: bytes) -> None:
        """A frame has come; BrokenFrame if it makes no sense."""

    @abstractmethod
    def ended(self, reason: str) -> None:
        """The connection is over."""

    def ping(self) -> bytes:
        """Return a keepalive frame."""
        return _PING

    def pinged(self, payload: bytes) -> None:
        """Process the payload of a ping from the other end."""

    def say(self, *parts: bytes) -> None:
        """Send these bytes with whatever else is said in this turn of the loop."""
        if not self._out:
            self._loop.call_soon(self._flush)
        self._out += parts

    @property
    def unsent_bytes(self) -> int:
        """What the other end has not taken yet."""
        return self._transport.get_write_buffer_size() if self._transport else 0

    def close(self, reason: str) -> None:
        """End the connection now; what is unsent is lost."""
        if self._transport is not None:
            transport, self._transport = self._transport, None
            if self._timer is not None:
                self._timer.cancel()
            transport.abort()
            self.ended(reason)

    def broken(self, error: BaseException | None) -> None:
        """End the connection for what its peer has sent, or has not, with a line in the log."""
        if self._transport is not None:
            logger.warning("a channel with %s is closed: %s", self.name, error)
            self.told = True
            self.close(str(error))

    # -- asyncio's -------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is of no class of asyncio
        address = transport.get_extra_info("peername")
        self.name = f"{address[0]}:{address[1]}" if address else "?"
        self._tick_at(self._loop.time() + PING_S)

    def data_received(self, data: bytes) -> None:
        self._heard_at = self._loop.time()
        try:
            for kind, call, tokens, payload in self._frames.feed(data):
                if kind == Kind.PING:
                    self.pinged(payload)
                else:
                    self.heard(kind, call, tokens, payload)
        except BrokenFrame as error:
            self.broken(error)

    def connection_lost(self, error: Exception | None) -> None:
        reason = f"the connection was lost: {error}" if error else "the other end has closed it"
        if self._frames.cut:
            self.broken(BrokenFrame(f"{reason}, in the middle of a frame"))
        else:
            self.close(reason)

    def _flush(self) -> None:
        if self._transport is not None:
            self._transport.writelines(self._out)
        self._out = []

    def _tick(self) -> None:
        now = self._loop.time()
        if now - self._due > PING_S:  # it was we who did not listen
            self._heard_at = now
        lost_at = self._heard_at + self._silent_s
        if now >= lost_at:
            self.broken(TimeoutError(f"silent for {self._silent_s:g} s"))
            return
        self.say(self.ping())
        # Not a whole period beyond the moment at which silence is too long; that moment itself, not a wait
        # until it, which rounding may make 0 for ever.
        self._tick_at(min(now + PING_S, lost_at))

    def _tick_at(self, due: float) -> None:
        self._due = due
        self._timer = self._loop.call_at(due, self._tick)
