"""What is told of a request that has ended: one line of JSON in the log, and spans of its trace."""

from __future__ import annotations

import json
import logging
from typing import TYPE_CHECKING

from eldr_serve.serving.request_record import RequestRecord

if TYPE_CHECKING:
    from eldr_serve.serving.tracing import Trace, Tracing

logger = logging.getLogger(__name__)


class RequestLog:
    """Of one ingress replica.

    Args:
        every: each request has its line; else those that something has failed, answered or not.
    """

    def __init__(self, *, every: bool, tracing: Tracing | None = None) -> None:
        self._every = every
        self._tracing = tracing

    def begin(self, path: str, tenant: str, headers: dict[str, str]) -> RequestRecord:
        """The record of a request that has come now; what it says is told when the request has ended.

        Args:
            headers: for its engines; with tracing, they get those of its trace.
        """
        trace = self._tracing.begin(path, headers) if self._tracing else None
        if trace is None:
            return RequestRecord(path, tenant, self._ended)
        headers.update(trace.headers)
        return RequestRecord(path, tenant, lambda record: self._ended(record, trace), trace.id)

    def _ended(self, record: RequestRecord, trace: Trace | None = None) -> None:
        if self._every or record.failures:  # at the level of warnings, which deployments show
            logger.warning("request %s", json.dumps(record.line()))
        if trace is not None:
            trace.end(record)

    async def stop(self) -> None:
        """Tell what is left."""
        if self._tracing is not None:
            await self._tracing.stop()
