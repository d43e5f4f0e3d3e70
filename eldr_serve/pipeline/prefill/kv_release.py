"""Release of prompts' KV blocks on prefill engines."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from eldr_serve.channel import Call, ChannelLostError
from eldr_serve.engine.methods import RELEASE
from eldr_serve.engine.protocol import EngineRequest
from eldr_serve.fleet.fleet import Fleet

logger = logging.getLogger(__name__)

_NOTICE_S = 5.0  # time for a decode engine to notify the prefill engine that it has read the blocks


class KvRelease:
    """Releases KV blocks in the background, since a cancelled request cannot wait for the release."""

    def __init__(self, prefill: Fleet) -> None:
        self._prefill = prefill
        self._background: set[asyncio.Task[Any]] = set()

    @property
    def num_pending(self) -> int:
        """Return the number of releases that have not ended."""
        return len(self._background)

    def release(self, request_id: str, replica: str, *, reader: Call | None = None) -> None:
        """Free the blocks of a prompt.

        Args:
            request_id: id of the prefill call.
            reader: the decode call that may still read the blocks. When the read is over, its engine
                notifies the prefill engine, which frees them; the call may end earlier. The release is sent
                in any case, because an engine that never got the request sends no notice.
        """
        task = asyncio.get_running_loop().create_task(self._send_release(request_id, replica, reader))
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def _send_release(self, request_id: str, replica: str, reader: Call | None) -> None:
        try:
            if reader is not None:
                await reader.wait_until_ended()
                await asyncio.sleep(_NOTICE_S)
            await self._prefill.call(replica, RELEASE, EngineRequest(id=request_id)).wait_until_ended()
        except ChannelLostError as error:
            logger.info("could not free KV blocks of %s before their lease ends: %s", request_id, error)
