"""Addresses and secrets of the channel servers that ingress replicas connect to."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import ray

from eldr_serve.channel import Channel, ChannelLostError, ChannelServer
from eldr_serve.channel.frames import VERSION
from eldr_serve.channel.server import ErrorResponse, Handler, OpenMethod
from eldr_serve.errors import OverloadedError

MAX_CALLS = 1_000_000  # Ray Serve LLM's value for its engines, which queue requests inside


@dataclass(frozen=True)
class Address:
    """Address of a channel server. Only Ray passes it on, so the secret stays in the application."""

    host: str
    port: int
    secret: str
    version: int = VERSION

    async def connect(self, on_change: Callable[[], None] = lambda: None) -> Channel:
        """Open a channel to this address; see Channel.connect."""
        if self.version != VERSION:
            raise ChannelLostError(f"the server's protocol version must be {VERSION}, got {self.version}")
        return await Channel.connect(self.host, self.port, self.secret, on_change)


async def start_channel_server(
    handler: Handler,
    *,
    error_response: ErrorResponse,
    max_calls: int = MAX_CALLS,
    limited_methods: Collection[str] | None = None,
    open_methods: Mapping[str, OpenMethod] = MappingProxyType({}),
    report: Callable[[], dict[str, Any]] = dict,
) -> tuple[Address, ChannelServer]:
    """Start a channel server with its own secret on this node; see ChannelServer."""
    secret = secrets.token_hex(16)

    def full_error() -> Exception:
        return OverloadedError(f"{max_calls} requests are in flight on this engine, which is the maximum")

    server = ChannelServer(
        secret,
        handler,
        error_response=error_response,
        max_calls=max_calls,
        limited_methods=limited_methods,
        full_error=full_error,
        open_methods=open_methods,
        report=report,
    )
    host = ray.util.get_node_ip_address()
    return Address(host, await server.start(host), secret), server
