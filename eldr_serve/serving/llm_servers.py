"""The engine deployments over vLLM, as Ray Serve LLM builds and places them."""

from __future__ import annotations

import eldr_serve.engine.vllm.imports  # noqa: F401

from typing import Any

from ray.serve.llm.deployment import LLMServer

from eldr_serve.engine.vllm.engine import VllmEngine
from eldr_serve.serving.servers import DecodeServer, EngineServer, PrefillServer


class _OverVllm(EngineServer):
    async def __init__(self, llm_config: Any, **kwargs: Any) -> None:  # type: ignore[misc]
        await super().__init__(llm_config, engine=VllmEngine.start, **kwargs)

    @classmethod
    def get_deployment_options(cls, llm_config: Any) -> dict[str, Any]:
        """Ray Serve LLM's hook: the resources that a replica takes."""
        options: dict[str, Any] = LLMServer.get_deployment_options(llm_config)
        return options


class LLMPrefillServer(_OverVllm, PrefillServer):
    """Prefill by vLLM."""


class LLMDecodeServer(_OverVllm, DecodeServer):
    """Decode by vLLM."""
