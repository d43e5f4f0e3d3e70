"""An engine backend that lets vLLM choose the data-parallel rank of some requests.

Decode engines use it if ELDR_ENGINE_BACKEND names it in their environment. Router and ingress still
count such a request on the rank that the router chose. The rank that vLLM chose reads the prompt's KV blocks,
whose location does not depend on it.
"""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from eldr_serve.engine.calls import GenerationReport
from eldr_serve.engine.protocol import Engine, EngineRequest, Send
from eldr_serve.engine.vllm.backend import VllmBackend

HEADER = "x-any-rank"  # a request with this header goes to the rank that vLLM chooses


class AnyRankBackend(VllmBackend):
    """The backend of vLLM, whose engines ignore the router's rank of requests with HEADER."""

    async def start(self, config: Any) -> Engine:
        """Start the engine of a replica, configured by an LLMConfig."""
        from eldr_serve.engine.vllm.engine import VllmEngine

        class AnyRankEngine(VllmEngine):
            async def generate(self, request: EngineRequest, send: Send) -> GenerationReport:
                if HEADER in request.headers:
                    request = replace(request, rank=None)
                return await super().generate(request, send)

        return await AnyRankEngine.start(config)
