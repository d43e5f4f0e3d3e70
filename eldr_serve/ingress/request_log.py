"""Log of finished requests: one line of JSON each, and the spans of their traces."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from eldr_serve.pipeline.context.request_context import RequestContext
from eldr_serve.request import Request

if TYPE_CHECKING:
    from eldr_serve.ingress.tracing import Trace, Tracing

logger = logging.getLogger(__name__)


class RequestLog:
    """Request log of one ingress replica, on the logger of this module; see show_request_lines.

    Args:
        every: log every request; false: only requests of which an attempt failed, even if they were answered.
        tracing: traces of the requests; None: no request is traced.
    """

    def __init__(self, *, every: bool, tracing: Tracing | None = None) -> None:
        self._every = every
        self._tracing = tracing

    def begin(self, url_path: str, request: Request, on_overflow: Callable[[], None]) -> RequestContext:
        """Return the context of a new request, which is logged when the request has ended.

        With tracing, the headers of the trace are added to the request's.

        Args:
            on_overflow: see RequestContext.
        """
        trace = self._tracing.begin(url_path, request.headers) if self._tracing else None
        if trace is None:
            return RequestContext(request, url_path, self._ended, on_overflow)
        request.headers.update(trace.headers)
        on_end = partial(self._ended, trace=trace)
        return RequestContext(request, url_path, on_end, on_overflow, trace_id=trace.id)

    def _ended(self, context: RequestContext, trace: Trace | None = None) -> None:
        if self._every or context.failures.messages:
            logger.info("request %s", json.dumps(context.line()))
        if trace is not None:
            trace.end(context)

    async def stop(self) -> None:
        """Export the remaining spans."""
        if self._tracing is not None:
            await self._tracing.stop()


def show_request_lines() -> None:
    """Write this logger's lines of level INFO to stderr, unless the process has configured logging itself.

    An ingress calls this once, when it starts, because Ray Serve adds handlers only to its own logger, whose
    level deployments set to WARNING, and Python shows only warnings of loggers without handlers.
    """
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.INFO)
    if not logger.hasHandlers():
        logger.addHandler(logging.StreamHandler())
