"""A connection between an ingress replica and an engine replica that carries all calls between the two."""

from eldr_serve.channel.calls import Call, Chunk, OpenCall
from eldr_serve.channel.client import Channel
from eldr_serve.channel.errors import CallFailedError, CallTimeoutError, ChannelLostError, SlowReaderError
from eldr_serve.channel.server import Answer, ChannelServer, OpenCallHandler

__all__ = [
    "Answer",
    "Call",
    "CallFailedError",
    "CallTimeoutError",
    "Channel",
    "ChannelLostError",
    "ChannelServer",
    "Chunk",
    "OpenCall",
    "OpenCallHandler",
    "SlowReaderError",
]
