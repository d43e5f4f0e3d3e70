"""Expert counts that a whole replica returns once it has prefilled a prompt, while it decodes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import msgspec
import numpy as np
from numpy.typing import NDArray

from eldr_serve.channel import Call, CallFailedError, ChannelLostError
from eldr_serve.experts.signature import unpack_counts

logger = logging.getLogger(__name__)
_MAX_DELAY_S = 1.0  # maximum delay after the end of the request

_Answer = tuple[int, str]  # tokens of the prompt, its packed counts
OnCounts = Callable[[NDArray[np.uint32], int], None]  # counts [L, E], tokens of the prompt


class MeasuredCounts:
    """A call for a prompt's expert counts, made before the prompt is sent.

    Args:
        call: the call of WAIT_FOR_COUNTS.
        on_counts: called once, if the engine counts the prompt.
    """

    def __init__(self, call: Call, on_counts: OnCounts) -> None:
        self._call = call
        self._on_counts = on_counts
        self._task = asyncio.get_running_loop().create_task(self._read())

    def finish(self) -> asyncio.Task[None]:
        """Cancel the call soon after the end of the request; return a task that ends with the call."""
        asyncio.get_running_loop().call_later(_MAX_DELAY_S, self._call.cancel)
        return self._task

    async def _read(self) -> None:
        try:
            chunk = await self._call.read()
            if chunk is not None:
                tokens, packed = msgspec.msgpack.decode(chunk.payload, type=_Answer)
                self._on_counts(unpack_counts(packed), tokens)
        except (ChannelLostError, CallFailedError):
            pass  # the request's own call reports it
        except Exception:  # unreadable counts must not fail the request
            logger.exception("expert counts of a prompt could not be read")
