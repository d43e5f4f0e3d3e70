"""Log of finished requests: one line of JSON each, and the spans of their traces."""

from __future__ import annotations

import json
import logging
from typing import TYPE_CHECKING

from eldr_serve.pipeline.request_record import RequestRecord

if TYPE_CHECKING:
    from eldr_serve.ingress.tracing import Trace, Tracing

logger = logging.getLogger(__name__)


class RequestLog:
    """Request log of one ingress replica.

    Args:
        every: log every request; otherwise only those with failures, answered or not.
    """

    def __init__(self, *, every: bool, tracing: Tracing | None = None) -> None:
        self._every = every
        self._tracing = tracing

    def begin(self, path: str, tenant: str, headers: dict[str, str]) -> RequestRecord:
        """Return the record of a new request; it is logged when the request has ended.

        Args:
            headers: headers for the engines; with tracing, those of the trace are added.
        """
        trace = self._tracing.begin(path, headers) if self._tracing else None
        if trace is None:
            return RequestRecord(path, tenant, self._ended)
        headers.update(trace.headers)
        return RequestRecord(path, tenant, lambda record: self._ended(record, trace), trace.id)

    def _ended(self, record: RequestRecord, trace: Trace | None = None) -> None:
        if self._every or record.failures:  # as a warning, since deployments show warnings
            logger.warning("request %s", json.dumps(record.line()))
        if trace is not None:
            trace.end(record)

    async def stop(self) -> None:
        """Export the remaining spans."""
        if self._tracing is not None:
            await self._tracing.stop()
