"""The two engine deployments: Ray Serve LLM servers with what a hand-over needs beside generation."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections import OrderedDict
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any

from ray.exceptions import RayError
from ray.serve.llm.deployment import LLMServer

from eldr_serve.engine import kv_usage, steps
from eldr_serve.engine.ray_backend import register_ray_backend
from eldr_serve.serving.budget import KV_USAGE, SAMPLE
from eldr_serve.serving.decode_router import find
from eldr_serve.serving.wire import GenerationRequest, transfer_params

logger = logging.getLogger(__name__)

_REPORT_PERIOD_S = 2.0


@dataclass(frozen=True)
class ReleaseKv:
    """Give back the KV blocks that a prefill engine keeps for a decode that will not come."""

    request_id: str  # as the prefill call carried it
    kv_transfer_params: dict[str, Any] = field(default_factory=dict)  # addresses the replica


class EngineServer(LLMServer):
    """A vLLM engine with the ELDR connector, as a Ray Serve deployment."""

    async def __init__(self, llm_config: Any, **kwargs: Any) -> None:  # type: ignore[misc]
        register_ray_backend()  # Ray prepares NIXL's ports for connector names that it knows
        await super().__init__(llm_config, **kwargs)


class PrefillServer(EngineServer):
    """Remembers which prompts' KV blocks wait for a decode engine, so that they can be released.

    A finished prefill's blocks are held until the decode engine has read them or the lease
    (`kv_lease_duration`, s) ends. If the client goes away in between, `release_kv` frees them at once.
    Its routing stats say how full the KV cache is (see PrefillBudget).
    """

    async def __init__(self, llm_config: Any, *, kv_lease_s: float = 30.0, **kwargs: Any) -> None:  # type: ignore[misc]
        self._kv_lease_s = kv_lease_s
        self._kept: OrderedDict[str, tuple[float, str]] = OrderedDict()  # request id -> since, engine's id
        self._samples = itertools.count()
        await super().__init__(llm_config, **kwargs)

    async def record_routing_stats(self) -> dict[str, Any]:
        """Serve's hook, called every SAMPLE_PERIOD_S; request routers see the answer."""
        stats: dict[str, Any] = await super().record_routing_stats()
        return stats | {KV_USAGE: kv_usage.last(), SAMPLE: next(self._samples)}

    async def chat(self, request: Any, raw_request_info: Any = None) -> AsyncGenerator[Any, None]:
        """As LLMServer.chat."""
        return self._remembered(request, await super().chat(request, raw_request_info))

    async def completions(self, request: Any, raw_request_info: Any = None) -> AsyncGenerator[Any, None]:
        """As LLMServer.completions."""
        return self._remembered(request, await super().completions(request, raw_request_info))

    async def _remembered(
        self, request: GenerationRequest, stream: AsyncGenerator[Any, None]
    ) -> AsyncGenerator[Any, None]:
        try:
            async for chunk in stream:
                remote_id = transfer_params(chunk).get("remote_request_id")
                if remote_id is not None:
                    self._forget_expired()
                    self._kept[request.request_id] = (time.monotonic(), remote_id)
                yield chunk
        except (asyncio.CancelledError, GeneratorExit):
            # The caller went away while the answer was on its way.
            asyncio.get_running_loop().create_task(self.release_kv(ReleaseKv(request.request_id)))
            raise

    def _forget_expired(self) -> None:
        oldest_useful = time.monotonic() - self._kv_lease_s
        while self._kept and next(iter(self._kept.values()))[0] < oldest_useful:
            self._kept.popitem(last=False)

    async def release_kv(self, release: ReleaseKv) -> bool:
        """Free the prompt's blocks now; False if there is nothing (left) to free."""
        _, remote_id = self._kept.pop(release.request_id, (0.0, None))
        if remote_id is None:
            return False
        await self.collective_rpc("eldr_release", args=([remote_id],))
        return True


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
