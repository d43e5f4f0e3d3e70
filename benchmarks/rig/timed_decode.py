"""Our decode server, with the time from a call's arrival at the replica to its first chunk."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from typing import Any

from eldr_serve.serving.servers import DecodeServer
from eldr_serve.serving.stages import Stages


class TimedDecodeServer(DecodeServer):
    """Holds the stage `engine`: KV pull, waiting for a step, and the first step."""

    async def __init__(self, *args: Any, **kwargs: Any) -> None:  # type: ignore[misc]
        self._stages = Stages()
        await super().__init__(*args, **kwargs)

    async def completions(self, request: Any, raw_request_info: Any = None) -> AsyncGenerator[Any, None]:
        """As DecodeServer.completions."""
        start = time.monotonic()
        return self._timed(start, await super().completions(request, raw_request_info))

    async def stages(self) -> dict[str, dict[str, float]]:
        """See Stages.summary."""
        return self._stages.summary()

    async def _timed(self, start: float, stream: AsyncGenerator[Any, None]) -> AsyncGenerator[Any, None]:
        waiting = True
        async for chunk in stream:
            if waiting:
                self._stages.record(engine=time.monotonic() - start)
                waiting = False
            yield chunk
