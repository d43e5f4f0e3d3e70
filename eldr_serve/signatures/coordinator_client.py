"""Calls of an application's signature pool from the ingress and from jobs."""

from __future__ import annotations

import asyncio
from typing import Any

from ray.exceptions import RayError

from eldr_serve.errors import OverloadedError, SwapRefusedError, one_line_message
from eldr_serve.signatures.pool import find_pool


class CoordinatorClient:
    """Client of the coordinating actor, which is looked up for each call since calls are rare.

    Both methods raise SwapRefusedError if the pool refuses, or OverloadedError if it does not answer.
    """

    def __init__(self, application: str) -> None:
        self._application = application

    async def refit(self) -> dict[str, Any]:
        """Fit a table to the pool's samples now; return its entry in the status."""
        entry: dict[str, Any] = await self._call("refit")
        return entry

    async def trace(self, tokenizer: str, vocabulary: int) -> bytes:
        """Return the pool's samples as a CalibrationTrace file; see SignaturePool.trace."""
        file: bytes = await self._call("trace", tokenizer, vocabulary)
        return file

    async def _call(self, method: str, *args: Any) -> Any:
        try:
            actor = await asyncio.to_thread(find_pool, self._application)
        except ValueError:
            raise SwapRefusedError(
                f"application {self._application!r} has no signature pool: set `signatures: {{actors: 1}}`"
            ) from None
        try:
            return await getattr(actor, method).remote(*args)
        except SwapRefusedError as error:  # the text of Ray's own exception includes the traceback
            raise SwapRefusedError(one_line_message(getattr(error, "cause", None) or error)) from None
        except RayError as error:
            raise OverloadedError(f"the signature pool does not answer ({type(error).__name__})") from error
