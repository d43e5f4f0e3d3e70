"""The two engine deployments: Ray Serve LLM servers with what a hand-over needs beside generation."""

from __future__ import annotations

import asyncio
import itertools
import logging
from dataclasses import dataclass, field
from typing import Any

from ray.exceptions import ActorDiedError, RayError
from ray.serve.llm.deployment import LLMServer

from eldr_serve.engine import kv_usage, steps
from eldr_serve.engine.ray_backend import register_ray_backend
from eldr_serve.serving.budget import KV_USAGE, SAMPLE
from eldr_serve.serving.decode_router import find

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


class PrefillServer(EngineServer):
    """Frees prompts' KV blocks that no decode engine will read.

    A finished prefill's blocks are held until the decode engine has read them or the lease
    (`kv_lease_duration`, s) ends. If the client goes away in between, `release_kv` frees them at once.
    Its routing stats say how full the KV cache is (see PrefillBudget).
    """

    async def __init__(self, llm_config: Any, **kwargs: Any) -> None:  # type: ignore[misc]
        self._samples = itertools.count()
        await super().__init__(llm_config, **kwargs)

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
        router: Any = None  # its handle
        while True:
            await asyncio.sleep(_REPORT_PERIOD_S)
            sums = steps.take()
            if not sums.steps:
                continue
            try:
                if router is None:  # a thread looks it up: that blocks while GCS is away
                    router = await asyncio.to_thread(find, self._router_name)
                await router.observe_steps.remote(sums)
            except (ValueError, RayError) as error:  # the router is away: newer steps will do
                if isinstance(error, ActorDiedError):  # for good: a restart keeps its handle
                    router = None
                logger.info("step costs not reported: %r", error)
