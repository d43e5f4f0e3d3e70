"""Calls of an application's signature pool from the ingress and from jobs."""

from __future__ import annotations

import asyncio
from typing import Any

from ray.exceptions import RayError

from eldr_serve.errors import Overloaded, SwapRefused, sentence
from eldr_serve.signatures.pool import find_pool


class PoolControl:
    """Client of the coordinating actor, which is looked up for each call since calls are rare.

    Both methods raise SwapRefused with one sentence if the pool refuses, or Overloaded if it does not answer.
    """

    def __init__(self, application: str) -> None:
        self._application = application

    async def refit(self) -> dict[str, Any]:
        """Fit a table to the pool's samples now; return its entry in the status."""
        found: dict[str, Any] = await self._call("refit")
        return found

    async def trace(self, tokenizer: str, vocabulary: int) -> bytes:
        """Return the pool's samples as a CalibrationTrace file; see SignaturePool.trace."""
        file: bytes = await self._call("trace", tokenizer, vocabulary)
        return file

    async def _call(self, method: str, *args: Any) -> Any:
        try:
            actor = await asyncio.to_thread(find_pool, self._application)
        except ValueError:
            raise SwapRefused(
                f"application {self._application!r} has no signature pool: set `signatures: {{actors: 1}}`"
            ) from None
        try:
            return await getattr(actor, method).remote(*args)
        except SwapRefused as error:  # the text of Ray's own exception includes the traceback
            raise SwapRefused(sentence(getattr(error, "cause", None) or error)) from None
        except RayError as error:
            raise Overloaded(f"the signature pool does not answer ({type(error).__name__})") from error
