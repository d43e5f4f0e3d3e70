"""Concurrency limit for retries, so that the requests of a lost engine do not flood the others."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from eldr_serve.errors import OverloadedError
from eldr_serve.pipeline.context.request_context import RequestContext
from eldr_serve.pipeline.path_options import PathOptions
from eldr_serve.queues.wait_estimate import WaitEstimator


class RetryLimiter:
    """Limits how many requests of one ingress are prefilled and placed again at the same time."""

    def __init__(self, options: PathOptions) -> None:
        self._options = options
        self._permits = asyncio.Semaphore(options.retries_at_once)
        self._waiting = 0
        self._waits = WaitEstimator()

    @asynccontextmanager
    async def permit(self, context: RequestContext) -> AsyncIterator[None]:
        """Wait for a permit if the request has failed before; raise OverloadedError on timeout."""
        failures = context.failures.attempts
        if not failures:
            yield
            return
        # Add jitter, since other requests failed at the same time.
        await asyncio.sleep(self._options.retry_backoff_s * 2 ** (failures - 1) * random.uniform(0.5, 1.5))
        self._waiting += 1
        try:
            async with asyncio.timeout(self._options.retry_wait_s):
                await self._permits.acquire()
        except TimeoutError:
            raise self._overloaded(context) from None
        finally:
            self._waiting -= 1
        try:
            yield
        finally:
            self._permits.release()
            self._waits.record_departure(empty=not self._waiting)

    def _overloaded(self, context: RequestContext) -> OverloadedError:
        why = (
            "have lost their engine"
            if context.failures.lost_engines
            else "are tried again after a call to an engine has failed"
        )
        return OverloadedError(
            f"too many requests {why}", retry_after_s=self._waits.retry_after_s(self._waiting)
        )
