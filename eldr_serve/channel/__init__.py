"""A connection between an ingress replica and an engine replica that carries all calls between the two."""

from eldr_serve.channel.client import (
    Call,
    CallFailed,
    CallLate,
    Channel,
    ChannelLost,
    Chunk,
    OpenCall,
    SlowReader,
)
from eldr_serve.channel.server import Answer, ChannelServer, OpenCallHandler

__all__ = [
    "Answer",
    "Call",
    "CallFailed",
    "CallLate",
    "Channel",
    "ChannelLost",
    "ChannelServer",
    "Chunk",
    "OpenCall",
    "OpenCallHandler",
    "SlowReader",
]
