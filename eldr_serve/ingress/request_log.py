"""Log of finished requests: one line of JSON each."""

from __future__ import annotations

import json
import logging

from eldr_serve.pipeline.context.request_context import RequestContext

logger = logging.getLogger(__name__)


class RequestLog:
    """Request log of one ingress replica, on the logger of this module; see show_request_lines.

    Args:
        every: log every request; false: only requests with a failed attempt, even if they were answered.
    """

    def __init__(self, *, every: bool) -> None:
        self._every = every

    def write(self, context: RequestContext) -> None:
        """Write the line of a request that has ended, if it is to be logged."""
        if self._every or context.failures.messages:
            logger.info("request %s", json.dumps(context.log_line()))


def show_request_lines() -> None:
    """Write this logger's lines of level INFO to stderr, unless the process has configured logging itself.

    An ingress calls this once, when it starts. Ray Serve adds handlers only to its own logger, whose level
    deployments set to WARNING. Of loggers without handlers, Python shows only warnings.
    """
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.INFO)
    if not logger.hasHandlers():
        logger.addHandler(logging.StreamHandler())
