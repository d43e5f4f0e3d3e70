"""Calls of the DecodeRouter actor: Ray says where it listens, one channel carries them all.

A call of an actor takes Ray 1.5 ms of CPU time, more than a placement.
"""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Callable
from typing import Any

from ray.actor import ActorHandle
from ray.exceptions import ActorDiedError, RayError

from eldr_serve.channel import CallFailed, Channel
from eldr_serve.errors import SwapRefused

AWAY = (RayError, ConnectionError, TimeoutError, CallFailed)  # raised where the actor cannot answer


class RouterCalls:
    """Of one process; lives in one event loop.

    Args:
        find: returns the actor's handle, starting the actor if need be. It may block, as Ray's calls do while
            GCS is away: a thread calls it, one at a time.
    """

    def __init__(self, find: Callable[[], ActorHandle]) -> None:
        self._find = find
        self._actor: Any = None  # a handle, good for every restart, until the actor is gone for good
        self._channel: Channel | None = None
        self._connecting: asyncio.Task[Channel] | None = None

    async def call(self, method: str, *args: Any) -> Any:
        """What the actor's method returns.

        Raises:
            SwapRefused: as the method does.
            CallFailed: the method failed.
            RayError, ConnectionError: the actor is not there.
        """
        channel = await self._connected()
        call = channel.call(method, {}, pickle.dumps(args, protocol=5))
        try:
            chunk = await call.read()
        except CallFailed as error:
            if error.status < 500:
                raise SwapRefused(error.body.decode()) from None
            raise
        except asyncio.CancelledError:
            call.cancel()
            raise
        return pickle.loads(chunk.payload if chunk else b"")

    def close(self) -> None:
        """End the channel; the next call makes another."""
        if self._connecting is not None:
            self._connecting.cancel()
            self._connecting = None
        if self._channel is not None:
            self._channel.close("its client stops")
            self._channel = None

    async def _connected(self) -> Channel:
        """The channel, made where there is none; that goes on when nobody waits for it."""
        if self._channel is None or not self._channel.open:
            if self._connecting is None:
                self._connecting = asyncio.get_running_loop().create_task(self._connect())
            connecting = self._connecting
            try:
                self._channel = await asyncio.shield(connecting)
            finally:
                if connecting.done() and self._connecting is connecting:
                    self._connecting = None
        return self._channel

    async def _connect(self) -> Channel:
        if self._actor is None:
            self._actor = await asyncio.to_thread(self._find)
        try:
            address = await self._actor.address.remote()
        except ActorDiedError:
            self._actor = None
            raise
        channel: Channel = await address.connect()
        return channel
