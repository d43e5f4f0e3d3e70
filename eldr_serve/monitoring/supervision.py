"""Background work whose failure must not end the process it runs in."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

logger = logging.getLogger(__name__)


def start_supervised(name: str, work: Callable[[], Awaitable[None]]) -> asyncio.Task[None]:
    """Start background work in a task with this name in the current loop; restart it after each failure."""
    return asyncio.get_event_loop().create_task(supervise(name, work), name=name)


async def supervise(
    name: str,
    work: Callable[[], Awaitable[None]],
    *,
    delay_s: float = 5.0,
    count: Callable[[str], None] = lambda name: None,
) -> None:
    """Run the work until it returns; log and count each exception, and start it again after a delay.

    Args:
        name: name of the work in the log.
        delay_s: time between a failure and the next start, s.
        count: called with the name after each failure.
    """
    while True:
        try:
            return await work()
        except Exception:
            logger.exception("%s failed; it starts again in %g s", name, delay_s)
            count(name)
        await asyncio.sleep(delay_s)
