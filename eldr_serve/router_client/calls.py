"""Calls of the DecodeRouter actor over one channel, whose address comes from Ray.

A Ray actor call takes 1.5 ms of CPU time, more than a placement.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import ActorDiedError

from eldr_serve.channel import Channel
from eldr_serve.router.settings import RouterSettings
from eldr_serve.router_protocol.messages import encode
from eldr_serve.router_protocol.methods import Arguments, Result, RouterMethod


class RouterCalls:
    """Calls of one ingress to the DecodeRouter actor, for one event loop.

    Args:
        find: returns the actor's handle, and starts the actor if needed. It is called in a thread, one call
            at a time, because Ray's look-up blocks while GCS is unavailable.
    """

    def __init__(self, find: Callable[[], ActorHandle]) -> None:
        self._find = find
        self._actor: Any = None  # handle, which stays valid across restarts of the actor
        self._channel: Channel | None = None
        self._connecting: asyncio.Task[Channel] | None = None

    async def call(self, method: RouterMethod[Arguments, Result], arguments: Arguments) -> Result:
        """Call a method of the actor and return its result.

        Raises:
            CallFailedError: the method failed; its status is below 500 if it raised SwapRefusedError.
            RayError, ConnectionError: the actor is unavailable.
        """
        channel = await self.get_channel()
        call = channel.call(method.name, {}, encode(arguments))
        parts = []
        try:
            while (chunk := await call.read()) is not None:
                parts.append(chunk.payload)
        except asyncio.CancelledError:
            call.cancel()
            raise
        return method.decode_result(b"".join(parts))

    async def configure(self, settings: RouterSettings) -> None:
        """Send the deployed settings to the actor, see DecodeRouter.configure; raise RayError on failure."""
        await self.get_channel()
        await self._actor.configure.remote(settings)

    def close(self) -> None:
        """Close the channel; the next call opens another."""
        if self._connecting is not None:
            self._connecting.cancel()
            self._connecting = None
        if self._channel is not None:
            self._channel.close("the ingress has stopped")
            self._channel = None

    async def get_channel(self) -> Channel:
        """Return the open channel, or open one; opening continues if the caller is cancelled."""
        if self._channel is not None and self._channel.is_open:
            return self._channel
        if self._connecting is None:
            self._connecting = asyncio.get_running_loop().create_task(self._connect_for_all())
        return await asyncio.shield(self._connecting)

    async def _connect_for_all(self) -> Channel:
        """Open the channel for all waiting callers, even if none waits any more."""
        try:
            self._channel = await self._connect()
            return self._channel
        finally:
            if self._connecting is asyncio.current_task():  # otherwise `close` was called meanwhile
                self._connecting = None

    async def _connect(self) -> Channel:
        if self._actor is None:
            self._actor = await asyncio.to_thread(self._find)
        if isinstance(self._actor, ActorHandle) and not ray.is_initialized():
            raise ConnectionError("Ray is shut down in this process")  # an actor call would start a new Ray
        try:
            address = await self._actor.address.remote()
        except ActorDiedError:
            self._actor = None
            raise
        channel: Channel = await address.connect()
        return channel
