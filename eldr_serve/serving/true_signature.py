"""What a whole engine says of a prompt once it has prefilled it, while it goes on to answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec
import numpy as np
from numpy.typing import NDArray

from eldr_serve.channel import Call, CallFailed, ChannelLost
from eldr_serve.signature import unpack_counts

METHOD = "signature"  # see protocol.Engine.signature
_LATER_S = 1.0  # that an answer may come after the one to the request itself

_Answer = tuple[int, str]  # tokens of the prompt, its packed counts
Told = Callable[[NDArray[np.uint32], int], None]  # counts [L, E], tokens of the prompt


class TrueSignature:
    """Asks a whole engine for a prompt's counts; made before the prompt is sent.

    Args:
        call: of METHOD.
        told: called once, if the engine counts the prompt.
    """

    def __init__(self, call: Call, told: Told) -> None:
        self._call = call
        self._told = told
        self._task = asyncio.get_running_loop().create_task(self._hear())

    def over(self) -> asyncio.Task[None]:
        """The request has ended, however; what is not said soon will not be. Done when that is known."""
        asyncio.get_running_loop().call_later(_LATER_S, self._call.cancel)
        return self._task

    async def _hear(self) -> None:
        try:
            chunk = await self._call.read()
            if chunk is not None:
                tokens, packed = msgspec.msgpack.decode(chunk.payload, type=_Answer)
                self._told(unpack_counts(packed), tokens)
        except (ChannelLost, CallFailed):
            pass  # the request itself says so
