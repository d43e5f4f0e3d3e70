"""The two engine deployments: Ray Serve LLM servers with what a hand-over needs beside generation."""

from __future__ import annotations

import eldr_serve.serving.imports  # noqa: F401

import asyncio
import itertools
import logging
import uuid
from dataclasses import asdict
from typing import Any

import vllm
from ray.exceptions import ActorDiedError, RayError

from eldr_serve.channel import Answer
from eldr_serve.engine import kv_usage, steps
from eldr_serve.serving.address import MAX_CALLS, open_channel
from eldr_serve.serving.autoscaling import IN_FLIGHT
from eldr_serve.serving.budget import KV_USAGE, SAMPLE
from eldr_serve.serving.compat import ENDPOINT_REQUESTS, QuietLLMServer, openai_serving, register_connector
from eldr_serve.serving.decode_router import find
from eldr_serve.serving.engine_calls import describe, generate, other, prefill, prefill_once
from eldr_serve.serving.errors import ConfigurationError, Refused, sentence
from eldr_serve.serving.fleet import METADATA
from eldr_serve.serving.wire import prefill_header, signature_of, warm_up_body

logger = logging.getLogger(__name__)

_REPORT_PERIOD_S = 1.0


class EngineServer(QuietLLMServer):
    """A vLLM engine with the ELDR connector, as a Ray Serve deployment that is called through its channel."""

    async def __init__(self, llm_config: Any, **kwargs: Any) -> None:  # type: ignore[misc]
        register_connector()
        self._samples = itertools.count()
        await super().__init__(llm_config, **kwargs)
        for method in ("chat", "completions"):
            openai_serving(self.engine, method)  # raises now rather than with the first request
        limit = int(llm_config.deployment_config.get("max_ongoing_requests") or MAX_CALLS)
        self._address, self._channel = await open_channel(self.answer, describe=describe, limit=limit)

    async def answer(self, method: str, header: dict[str, Any], body: bytes, answer: Answer) -> None:
        """Answer a call of an ingress replica."""
        if method == "generate":
            await generate(self.engine, header, body, answer)
        elif method in ENDPOINT_REQUESTS:
            await other(self, method, header, body, answer)
        else:
            raise Refused(f"an engine has no call {method!r}", status=400)

    async def record_replica_metadata(self) -> dict[str, Any]:
        """Serve's hook: how ingress replicas reach this one."""
        return {METADATA: asdict(self._address)}

    async def record_routing_stats(self) -> dict[str, Any]:
        """Serve's hook, called every SAMPLE_PERIOD_S; request routers see how full the KV cache is."""
        stats: dict[str, Any] = await super().record_routing_stats()
        return stats | {KV_USAGE: kv_usage.last(), SAMPLE: next(self._samples)}

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Serve's hook: what it cannot count itself."""
        return {IN_FLIGHT: float(self._channel.in_flight)}

    async def __del__(self) -> None:
        """Serve's hook before it ends the replica: streams end first."""
        channel = getattr(self, "_channel", None)
        if channel is not None:
            await channel.drain()
        await super().__del__()


class PrefillServer(EngineServer):
    """Makes one token of each prompt that is handed over (see first_token), and frees prompts' KV blocks
    that no decode engine will read.

    A finished prefill's blocks are held until the decode engine has read them or the lease
    (`kv_lease_duration`, s) ends. If the client goes away in between, call `release` frees them at once.
    Its routing stats say how full the KV cache is (see PrefillBudget).

    Raises:
        ConfigurationError: the engine counts no experts. Requests would be served, and placed by load alone.
    """

    async def __init__(self, llm_config: Any, **kwargs: Any) -> None:  # type: ignore[misc]
        await super().__init__(llm_config, **kwargs)
        await self._check_capture(llm_config.model_id)

    async def answer(self, method: str, header: dict[str, Any], body: bytes, answer: Answer) -> None:
        """As an EngineServer, and the calls that only prefill engines take."""
        if method == "prefill":
            await prefill(self.engine, header, body, answer)
        elif method == "release":
            await self._release(header["id"])
        else:
            await super().answer(method, header, body, answer)

    async def _check_capture(self, model_id: str) -> None:
        request_id = f"start-{uuid.uuid4().hex}"
        header = prefill_header("completions", request_id)
        try:
            found = await prefill_once(self.engine, header, warm_up_body(model_id))
        except Exception as error:
            raise ConfigurationError(
                f"the prefill engine of {model_id!r} failed its first prompt: {sentence(error)}"
            ) from error
        if signature_of(found.kv_transfer_params or {}) is None:
            raise ConfigurationError(
                f"the prefill engine of {model_id!r} (vLLM {vllm.__version__}) answered its first prompt "
                "without an expert signature, so requests would be placed by load alone: leave kv_connector, "
                "kv_role and scheduler_cls in prefill_config's engine_kwargs to eldr-serve"
            )
        await self._release(request_id)

    async def _release(self, request_id: str) -> None:
        """Free the prompt's blocks, now or, while it is still computed, when it ends."""
        await self.collective_rpc("eldr_abandon", args=([request_id],))


class DecodeServer(EngineServer):
    """A decode engine that tells the DecodeRouter what its steps cost."""

    async def __init__(self, llm_config: Any, *, router_name: str, **kwargs: Any) -> None:  # type: ignore[misc]
        await super().__init__(llm_config, **kwargs)
        self._router_name = router_name
        self._reporter = asyncio.get_running_loop().create_task(self._report_steps())

    async def _report_steps(self) -> None:
        router: Any = None  # an actor's handle
        while True:
            await asyncio.sleep(_REPORT_PERIOD_S)
            sums = steps.take()
            if not sums.steps:
                continue
            try:
                if router is None:  # a thread looks it up: that blocks while GCS is away
                    router = await asyncio.to_thread(find, self._router_name)
                await router.observe_steps.remote(sums)
            except (ValueError, RayError) as error:  # the router is away
                steps.put_back(sums)
                if isinstance(error, ActorDiedError):  # for good: a restart keeps its handle
                    router = None
                logger.info("step costs not reported: %r", error)
