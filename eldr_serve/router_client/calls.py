"""Calls of the DecodeRouter actor over one channel, whose address comes from Ray.

A Ray actor call takes 1.5 ms of CPU time, which is more than a placement takes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import ActorDiedError

from eldr_serve.channel import Channel
from eldr_serve.channel.address import Address
from eldr_serve.errors import SwapRefusedError, one_line_message
from eldr_serve.router.settings import RouterSettings
from eldr_serve.router_protocol.messages import LiveSettings, encode
from eldr_serve.router_protocol.methods import Arguments, Result, RouterMethod


class RouterCalls:
    """Calls of one ingress to the DecodeRouter actor, for one event loop.

    Args:
        find: returns the actor's handle, and starts the actor if needed. It is called in a thread, one call
            at a time, because Ray's look-up blocks while GCS is unavailable.
        settings: deployed settings for `configure`; None: the actor keeps its first settings.
    """

    def __init__(self, find: Callable[[], ActorHandle], settings: RouterSettings | None = None) -> None:
        self._find = find
        self._settings = settings
        self._actor: Any = None  # handle, which stays valid across restarts of the actor
        # Each process of the actor has an address of its own.
        self._address: Address | None = None
        self._configured_address: Address | None = None
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

    async def configure(self, live: LiveSettings | None) -> None:
        """Send the deployed settings to the actor unless its process has them; see DecodeRouter.configure.

        Args:
            live: newest live settings that the ingress knows, if any.

        Raises:
            SwapRefusedError: the actor refuses the settings.
            RayError, ConnectionError: the actor is unavailable.
        """
        if self._settings is None:
            return
        try:
            await self.get_channel()
            if (address := self._address) == self._configured_address:
                return
            await self._actor.configure.remote(self._settings, live)
            self._configured_address = address
        except (SwapRefusedError, ActorDiedError) as error:
            if (reason := _refusal(error)) is None:
                raise
            raise SwapRefusedError(f"the router refuses the deployed settings: {reason}") from None

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
        self._address = address
        return channel


def _refusal(error: SwapRefusedError | ActorDiedError) -> str | None:
    """Return why the actor refuses the deployed settings; None if it has ended for another reason."""
    if isinstance(error, SwapRefusedError):  # the text of Ray's own exception includes the traceback
        return one_line_message(getattr(error, "cause", None) or error)
    if error.actor_init_failed:  # the last line is the error that the actor's constructor has raised
        return str(error).rstrip().rpartition("\n")[2]
    return None
