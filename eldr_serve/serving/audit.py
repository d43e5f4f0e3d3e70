"""The audit log: who changed the service, or tried to, and what came of it."""

from __future__ import annotations

import hashlib
import json
import logging
from typing import Any

from starlette.datastructures import Headers
from starlette.types import Message, Scope, Send

from eldr_serve.serving.keys import digest

logger = logging.getLogger(__name__)

_SHOWN_BYTES = 1000  # of a body; all of it has a hash


class Audit:
    """One line of JSON about one request to /eldr.

    `what` is the beginning of a body that is text; `sha256` is all of it. `key_sha256` begins the hash of the
    admin key that was used, where it was right; nothing is kept of wrong ones.
    """

    def __init__(self, scope: Scope, headers: Headers) -> None:
        client = scope.get("client")
        self.status: int | None = None  # none: the client went before it had an answer
        self._line: dict[str, Any] = {
            "method": scope["method"],
            "path": scope["path"],
            "client": client[0] if client else None,
            "user_agent": headers.get("user-agent", "")[:200],
            "key_sha256": None,
        }

    def authorised(self, headers: Headers, body: bytes) -> None:
        """The key is right, and this was sent."""
        key = headers.get("authorization", "").removeprefix("Bearer ")
        self._line |= {"key_sha256": digest(key)[:12], "sha256": hashlib.sha256(body).hexdigest()}
        self._line["bytes"] = len(body)
        if body.isascii():
            self._line["what"] = body[:_SHOWN_BYTES].decode()

    def watched(self, send: Send) -> Send:
        """`send`, of which the answer's status is learnt."""

        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start":
                self.status = message["status"]
            await send(message)

        return sending

    def write(self) -> None:
        """At the level of warnings, which deployments show."""
        logger.warning("audit %s", json.dumps(self._line | {"status": self.status}))
