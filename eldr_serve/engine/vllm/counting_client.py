"""A client of a replica's engine that counts the tokens of an answer with several sequences."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any


class CountingClient:
    """A proxy of a vLLM engine client that counts the tokens which `generate` yields.

    An event of a stream does not show how many tokens it has, for example after speculative decoding.

    Args:
        client: vLLM's client of the engine.
    """

    def __init__(self, client: Any) -> None:
        self._client = client
        self._tokens = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def take_token_count(self) -> int:
        """Return the number of tokens since the last call."""
        tokens, self._tokens = self._tokens, 0
        return tokens

    async def generate(self, *args: Any, **kwargs: Any) -> AsyncGenerator[Any, None]:
        """Generate as the client does."""
        async with aclosing(self._client.generate(*args, **kwargs)) as outputs:
            async for output in outputs:
                self._tokens += sum(len(completion.token_ids) for completion in output.outputs)
                yield output
