"""Engine deployments over the selected kind of engine."""

from __future__ import annotations

from eldr_serve.engine.active_backend import BACKEND
from eldr_serve.replicas.log_handlers import restore_log_handlers

with restore_log_handlers():
    BACKEND.import_software()  # this precedes any import that a replica's arguments cause

from typing import Any

from eldr_serve.replicas.servers import DecodeServer, EngineServer, PrefillServer


class _BackendServer(EngineServer):
    # Ray Serve awaits the constructor of a replica.
    async def __init__(self, llm_config: Any, **kwargs: Any) -> None:  # type: ignore[misc]
        await super().__init__(llm_config, start_engine=BACKEND.start, **kwargs)

    @classmethod
    def get_deployment_options(cls, llm_config: Any) -> dict[str, Any]:
        """Return the resources that a replica takes; Ray Serve LLM calls this."""
        return BACKEND.deployment_options(llm_config)


class LLMPrefillServer(_BackendServer, PrefillServer):
    """Prefill server over the selected kind of engine."""


class LLMDecodeServer(_BackendServer, DecodeServer):
    """Decode server over the selected kind of engine."""
