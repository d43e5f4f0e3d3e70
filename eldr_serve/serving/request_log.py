"""The log of requests: one line of JSON about a request that has ended."""

from __future__ import annotations

import json
import logging

from eldr_serve.serving.request_record import RequestRecord

logger = logging.getLogger(__name__)


class RequestLog:
    """Of one ingress replica.

    Args:
        every: each request has its line; else those that something has failed, answered or not.
    """

    def __init__(self, *, every: bool) -> None:
        self._every = every

    def begin(self, path: str, tenant: str) -> RequestRecord:
        """The record of a request that has come now, which is logged when it has ended."""
        return RequestRecord(path, tenant, self._ended)

    def _ended(self, record: RequestRecord) -> None:
        if self._every or record.failures:  # at the level of warnings, which deployments show
            logger.warning("request %s", json.dumps(record.line()))
