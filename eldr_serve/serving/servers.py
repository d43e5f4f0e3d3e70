"""The two engine deployments: Ray Serve LLM servers with what a hand-over needs beside generation."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any

from ray.exceptions import RayError
from ray.serve.llm.deployment import LLMServer
from vllm.entrypoints.serve import create_error_response

from eldr_serve.engine import kv_usage, steps
from eldr_serve.engine.ray_backend import register_ray_backend
from eldr_serve.serving.budget import KV_USAGE, SAMPLE
from eldr_serve.serving.compat import ErrorInfo, ErrorResponse, openai_serving
from eldr_serve.serving.decode_router import find
from eldr_serve.serving.first_token import first_token
from eldr_serve.serving.wire import transfer_params

logger = logging.getLogger(__name__)

_REPORT_PERIOD_S = 2.0


@dataclass(frozen=True)
class ReleaseKv:
    """Give back the KV blocks that a prefill engine keeps for a decode that will not come."""

    request_id: str  # as the prefill call carried it (keys.REQUEST)
    kv_transfer_params: dict[str, Any] = field(default_factory=dict)  # addresses the replica


class EngineServer(LLMServer):
    """A vLLM engine with the ELDR connector, as a Ray Serve deployment."""

    async def __init__(self, llm_config: Any, **kwargs: Any) -> None:  # type: ignore[misc]
        register_ray_backend()  # Ray prepares NIXL's ports for connector names that it knows
        await super().__init__(llm_config, **kwargs)

    async def _run_request(self, request: Any, **kwargs: Any) -> AsyncGenerator[Any, None]:
        """Ray's seam between all endpoints and the engine (see compat)."""
        return _client_errors_answered(await super()._run_request(request, **kwargs))


async def _client_errors_answered(answers: AsyncGenerator[Any, None]) -> AsyncGenerator[Any, None]:
    """The same; but what vLLM calls a client's error is the answer where Ray lets it through as a fault.

    The caller would take a fault for the engine's and try the next one.
    """
    begun = False
    try:
        async for answer in answers:
            begun = True
            yield answer
    except Exception as error:
        said = create_error_response(error).error
        if begun or said.code >= 500:
            raise
        yield ErrorResponse(error=ErrorInfo(**said.model_dump()))


class PrefillServer(EngineServer):
    """Makes one token of each request that is handed over (see first_token), and frees prompts' KV blocks
    that no decode engine will read.

    A finished prefill's blocks are held until the decode engine has read them or the lease
    (`kv_lease_duration`, s) ends. If the client goes away in between, `release_kv` frees them at once.
    Its routing stats say how full the KV cache is (see PrefillBudget).
    """

    async def __init__(self, llm_config: Any, **kwargs: Any) -> None:  # type: ignore[misc]
        self._samples = itertools.count()
        await super().__init__(llm_config, **kwargs)
        for method in ("chat", "completions"):
            openai_serving(self.engine, method)  # raises now rather than with the first request

    async def _run_request(self, request: Any, **kwargs: Any) -> AsyncGenerator[Any, None]:
        if not transfer_params(request).get("do_remote_decode"):
            return await super()._run_request(request, **kwargs)
        method, raw_request_info = kwargs["engine_method"], kwargs.get("raw_request_info")
        return _client_errors_answered(first_token(self.engine, method, request, raw_request_info))

    async def record_routing_stats(self) -> dict[str, Any]:
        """Serve's hook, called every SAMPLE_PERIOD_S; request routers see the answer."""
        stats: dict[str, Any] = await super().record_routing_stats()
        return stats | {KV_USAGE: kv_usage.last(), SAMPLE: next(self._samples)}

    async def release_kv(self, release: ReleaseKv) -> None:
        """Free the prompt's blocks, now or, while it is still computed, when it ends."""
        await self.collective_rpc("eldr_give_up", args=([release.request_id],))


class DecodeServer(EngineServer):
    """A decode engine that tells the DecodeRouter what its steps cost."""

    async def __init__(self, llm_config: Any, *, router_name: str, **kwargs: Any) -> None:  # type: ignore[misc]
        await super().__init__(llm_config, **kwargs)
        self._router_name = router_name
        self._reporter = asyncio.get_running_loop().create_task(self._report_steps())

    async def _report_steps(self) -> None:
        while True:
            await asyncio.sleep(_REPORT_PERIOD_S)
            sums = steps.take()
            if not sums.steps:
                continue
            try:
                await find(self._router_name).observe_steps.remote(sums)
            except (ValueError, RayError) as error:  # the router is away: newer steps will do
                logger.info("step costs not reported: %r", error)
