"""A TCP connection that carries all calls of an ingress to one engine replica or to the router."""

from eldr_serve.channel.calls import Call, Chunk, OpenCall
from eldr_serve.channel.client import Channel
from eldr_serve.channel.errors import CallFailedError, CallTimeoutError, ChannelLostError, SlowReaderError
from eldr_serve.channel.server import ChannelServer, OpenCallHandler, Reply

__all__ = [
    "Call",
    "CallFailedError",
    "CallTimeoutError",
    "Channel",
    "ChannelLostError",
    "ChannelServer",
    "Chunk",
    "OpenCall",
    "OpenCallHandler",
    "Reply",
    "SlowReaderError",
]
