"""The two engine deployments: Ray Serve LLM servers with what a hand-over needs beside generation."""

from __future__ import annotations

import eldr_serve.serving.imports  # noqa: F401

import asyncio
import itertools
import logging
import uuid
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any

import vllm
from ray.exceptions import ActorDiedError, RayError

from eldr_serve.engine import kv_usage, steps
from eldr_serve.serving.budget import KV_USAGE, SAMPLE
from eldr_serve.serving.compat import (
    CompletionRequest,
    ErrorInfo,
    ErrorResponse,
    QuietLLMServer,
    create_error_response,
    openai_serving,
    register_connector,
)
from eldr_serve.serving.decode_router import find
from eldr_serve.serving.errors import ConfigurationError
from eldr_serve.serving.first_token import first_token
from eldr_serve.serving.wire import prefill_request, signature_of, transfer_params

logger = logging.getLogger(__name__)

_REPORT_PERIOD_S = 1.0


@dataclass(frozen=True)
class ReleaseKv:
    """Give back the KV blocks that a prefill engine keeps for a decode that will not come."""

    request_id: str  # as the prefill call carried it (keys.REQUEST)
    kv_transfer_params: dict[str, Any] = field(default_factory=dict)  # addresses the replica


def warm_up_request(model_id: str) -> CompletionRequest:
    """A short prompt of nobody's, whose one token is drawn at random and comes with its log-probability."""
    prompt = "warm up the transfer of one block"
    return CompletionRequest(model=model_id, prompt=prompt, max_tokens=1, temperature=1.0, logprobs=0)


class EngineServer(QuietLLMServer):
    """A vLLM engine with the ELDR connector, as a Ray Serve deployment."""

    async def __init__(self, llm_config: Any, **kwargs: Any) -> None:  # type: ignore[misc]
        register_connector()
        self._samples = itertools.count()
        await super().__init__(llm_config, **kwargs)

    async def record_routing_stats(self) -> dict[str, Any]:
        """Serve's hook, called every SAMPLE_PERIOD_S; request routers see how full the KV cache is."""
        stats: dict[str, Any] = await super().record_routing_stats()
        return stats | {KV_USAGE: kv_usage.last(), SAMPLE: next(self._samples)}

    async def run_request(self, request: Any, **kwargs: Any) -> AsyncGenerator[Any, None]:
        """As Ray's, but that what vLLM calls a client's error is one."""
        return _client_errors_answered(await super().run_request(request, **kwargs))


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

    Raises:
        ConfigurationError: the engine counts no experts. Requests would be served, and placed by load alone.
    """

    async def __init__(self, llm_config: Any, **kwargs: Any) -> None:  # type: ignore[misc]
        await super().__init__(llm_config, **kwargs)
        for method in ("chat", "completions"):
            openai_serving(self.engine, method)  # raises now rather than with the first request
        await self._check_capture(llm_config.model_id)

    async def run_request(self, request: Any, **kwargs: Any) -> AsyncGenerator[Any, None]:
        """A prefill ends with its first token."""
        if not transfer_params(request).get("do_remote_decode"):
            return await super().run_request(request, **kwargs)
        method, raw_request_info = kwargs["engine_method"], kwargs.get("raw_request_info")
        return _client_errors_answered(first_token(self.engine, method, request, raw_request_info))

    async def _check_capture(self, model_id: str) -> None:
        request = prefill_request(warm_up_request(model_id), f"start-{uuid.uuid4().hex}", 0)
        answer = await anext(await self.completions(request))
        if isinstance(answer, ErrorResponse):
            raise ConfigurationError(
                f"the prefill engine of {model_id!r} failed its first prompt: {answer.error.message}"
            )
        if signature_of(transfer_params(answer)) is None:
            raise ConfigurationError(
                f"the prefill engine of {model_id!r} (vLLM {vllm.__version__}) answered its first prompt "
                "without an expert signature, so requests would be placed by load alone: leave kv_connector, "
                "kv_role and scheduler_cls in prefill_config's engine_kwargs to eldr-serve"
            )
        await self.release_kv(ReleaseKv(request.request_id))

    async def release_kv(self, release: ReleaseKv) -> None:
        """Free the prompt's blocks, now or, while it is still computed, when it ends."""
        await self.collective_rpc("eldr_abandon", args=([release.request_id],))


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
