"""DecodeServer, extended so that it times a call from arrival at the replica to its first chunk, in parts."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextvars import ContextVar
from typing import Any

from eldr_serve.channel import Reply
from eldr_serve.engine.protocol import EngineRequest
from eldr_serve.engine.vllm.compat.serve_llm import engine_client
from eldr_serve.pipeline.context.stage_latencies import StageLatencies
from eldr_serve.replicas.llm_servers import LLMDecodeServer

_called_at: ContextVar[float] = ContextVar("called_at")


class TimedDecodeServer(LLMDecodeServer):
    """A DecodeServer that records the stages of each request with vLLM's own clock.

    The stage `engine` is the total. `admit` ends when the engine core has the request, `wait` when the first
    step is scheduled, which includes the KV pull, and `step` with the first token. `pull` is NIXL's time of a
    pull, from its start until the engine has noticed its end.
    """

    async def __init__(self, *args: Any, **kwargs: Any) -> None:  # type: ignore[misc]
        self._stages = StageLatencies()
        await super().__init__(*args, **kwargs)
        engine: Any = self._engine
        client = engine_client(engine.server.engine)
        self._client_generate = client.generate
        client.generate = self._generate_timed
        self._record = client.logger_manager.record
        client.logger_manager.record = self._record_stats

    async def handle_call(self, method: str, request: EngineRequest, reply: Reply) -> None:
        """Handle a call like DecodeServer.handle_call."""
        _called_at.set(time.monotonic())
        timed: Any = _Timed(reply, self._stages)
        await super().handle_call(method, request, timed)

    async def stages(self) -> dict[str, dict[str, float]]:
        """Return StageLatencies.summary."""
        return self._stages.summary()

    def _record_stats(self, scheduler_stats: Any, *args: Any, **kwargs: Any) -> None:
        """Record stats in place of vLLM's logging of a step's stats."""
        stats = getattr(scheduler_stats, "kv_connector_stats", None) or {}
        for seconds in (stats.get("nixl") or {}).get("transfer_duration", ()):
            self._stages.record(pull=seconds)
        self._record(scheduler_stats, *args, **kwargs)

    async def _generate_timed(self, *args: Any, **kwargs: Any) -> AsyncGenerator[Any, None]:
        waiting = True
        async for output in self._client_generate(*args, **kwargs):
            if waiting:
                metrics, waiting = output.metrics, False
                self._stages.record(
                    admit=metrics.queued_ts - _called_at.get(),
                    wait=metrics.scheduled_ts - metrics.queued_ts,
                    step=metrics.first_token_ts - metrics.scheduled_ts,
                )
            yield output


class _Timed:
    """A Reply that records when its first part is sent."""

    def __init__(self, reply: Reply, stages: StageLatencies) -> None:
        self._reply = reply
        self._stages = stages
        self._waiting = True

    def send(self, payload: bytes, tokens: int = 0, ids: bytes = b"") -> None:
        if self._waiting:
            self._stages.record(engine=time.monotonic() - _called_at.get())
            self._waiting = False
        self._reply.send(payload, tokens, ids)
