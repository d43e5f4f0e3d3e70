"""Errors of calls over a channel."""

from __future__ import annotations

import msgspec


class ChannelLostError(ConnectionError):
    """The connection was lost or could not be made.

    Attributes:
        silent: the other end has sent nothing for too long; it may be alive.
    """

    def __init__(self, reason: str, *, silent: bool = False) -> None:
        super().__init__(reason)
        self.silent = silent


class SlowReaderError(RuntimeError):
    """The client of a stream reads too slowly; the stream was cancelled."""


class CallTimeoutError(TimeoutError):
    """The engine sent nothing for too long on an open channel; the call was cancelled."""


class CallFailedError(RuntimeError):
    """The engine reports that a call has failed; raised both in the engine and in the ingress.

    Attributes:
        status: HTTP status; if it is below 500, the request is at fault.
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
