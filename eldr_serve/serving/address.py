"""Where a process of the application listens for the ingress replicas, and what one must say there."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ray

from eldr_serve.channel import Channel, ChannelLost, ChannelServer
from eldr_serve.channel.frames import VERSION
from eldr_serve.channel.server import Describe, Handler
from eldr_serve.errors import Overloaded

MAX_CALLS = 1_000_000  # as Ray Serve LLM sets it for its engines: they queue inside


@dataclass(frozen=True)
class Address:
    """Only Ray passes it on, so only who belongs to the application knows the secret."""

    host: str
    port: int
    secret: str
    version: int = VERSION

    async def connect(self, changed: Callable[[], None] = lambda: None) -> Channel:
        """A channel to it; see Channel.connect."""
        if self.version != VERSION:
            raise ChannelLost(f"it speaks version {self.version} of the channel, not {VERSION}")
        return await Channel.connect(self.host, self.port, self.secret, changed)


async def open_channel(
    handler: Handler,
    *,
    describe: Describe,
    limit: int = MAX_CALLS,
    on_lost: Callable[[object], None] = lambda peer: None,
    report: Callable[[], dict[str, Any]] = dict,
) -> tuple[Address, ChannelServer]:
    """Listen on this node, with a secret of its own; see ChannelServer."""
    secret = secrets.token_hex(16)

    def full() -> Exception:
        return Overloaded(f"{limit} requests are in flight on this engine, the most allowed")

    server = ChannelServer(
        secret, handler, describe=describe, limit=limit, full=full, on_lost=on_lost, report=report
    )
    host = ray.util.get_node_ip_address()
    return Address(host, await server.start(host), secret), server
