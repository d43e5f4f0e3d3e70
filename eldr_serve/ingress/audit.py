"""The audit log of requests that change the service or read its traffic, with their outcome."""

from __future__ import annotations

import hashlib
import json
import logging
from typing import Any

from starlette.datastructures import Headers
from starlette.types import Message, Scope, Send

from eldr_serve.limits.keys import bearer_key, digest

logger = logging.getLogger(__name__)

_LOGGED_BYTES = 1000  # start of the body that is logged; the hash covers all of it


class Audit:
    """One line of JSON about one request to /eldr.

    `what` is the start of an ASCII body, and `sha256` the hash of the whole body. `key_sha256` is the start
    of the admin key's hash if the key was right; nothing of wrong keys is logged.
    """

    def __init__(self, scope: Scope, headers: Headers) -> None:
        client = scope.get("client")
        self.status: int | None = None  # None: the client disconnected before the response
        self._line: dict[str, Any] = {
            "method": scope["method"],
            "path": scope["path"],
            "client": client[0] if client else None,
            "user_agent": headers.get("user-agent", "")[:200],
            "key_sha256": None,
        }

    def record_request(self, headers: Headers, body: bytes) -> None:
        """Record the admin key, which has been checked, and the body."""
        key = bearer_key(headers.get("authorization", "")) or ""
        self._line |= {"key_sha256": digest(key)[:12], "sha256": hashlib.sha256(body).hexdigest()}
        self._line["bytes"] = len(body)
        if body.isascii():
            self._line["what"] = body[:_LOGGED_BYTES].decode()

    def capture_status(self, send: Send) -> Send:
        """Return a `send` that records the response's status."""

        async def record_and_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                self.status = message["status"]
            await send(message)

        return record_and_send

    def write(self) -> None:
        """Write the line as a warning, a level that deployments show."""
        logger.warning("audit %s", json.dumps(self._line | {"status": self.status}))
