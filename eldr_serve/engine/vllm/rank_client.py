"""A client of a replica's engine that generates answers on one data-parallel rank."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any


class RankClient:
    """A proxy of a vLLM engine client whose `generate` runs on one data-parallel rank.

    vLLM's endpoints read the rank from a header, except the endpoints of the Responses API.

    Args:
        client: vLLM's client of the engine.
        rank: data-parallel rank; vLLM refuses one that the engine does not have.
    """

    def __init__(self, client: Any, rank: int) -> None:
        self._client = client
        self._rank = rank

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def generate(self, *args: Any, **kwargs: Any) -> AsyncGenerator[Any, None]:
        """Generate as the client does, on the rank."""
        outputs: AsyncGenerator[Any, None] = self._client.generate(
            *args, **{**kwargs, "data_parallel_rank": self._rank}
        )
        return outputs
