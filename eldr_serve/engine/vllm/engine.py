"""A vLLM engine in a replica, used through Ray Serve LLM's server and vLLM's own OpenAI endpoints."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import Any

import numpy as np
import pydantic_core
import vllm
from numpy.typing import ArrayLike
from pydantic import ValidationError

from eldr_serve.channel import CallFailed
from eldr_serve.engine.keys import CALIBRATE, CREATED, EXPERT_COUNTS, REQUEST
from eldr_serve.engine.protocol import EngineRequest, Prefilled, Send, several_prompts
from eldr_serve.engine.samples import SampleBuffer
from eldr_serve.engine.vllm.compat import late_metrics
from eldr_serve.engine.vllm.compat.checked import clear_start
from eldr_serve.engine.vllm.compat.kv_cache import prefix_cache
from eldr_serve.engine.vllm.compat.serve_llm import (
    ENDPOINT_REQUESTS,
    QuietLLMServer,
    RawRequestInfo,
    canonical_request_id,
    check_serving,
    create_error_response,
    engine_client,
    openai_serving,
    parameter_of,
    register_connector,
    with_client,
    wrap_stream,
)
from eldr_serve.engine.vllm.continuation import Continuation
from eldr_serve.engine.vllm.ep.plugin import switched_on
from eldr_serve.engine.vllm.ep.swap import HeldExperts
from eldr_serve.engine.vllm.first_token import first_token
from eldr_serve.engine.vllm.measured import MEASURED
from eldr_serve.engine.vllm.plain_stream import PlainStream, is_plain
from eldr_serve.engine.vllm.requests import parse_request, set_prompt
from eldr_serve.errors import ConfigurationError, Refused, sentence
from eldr_serve.experts.placement import ExpertPlacement
from eldr_serve.experts.sample import ExpertSample
from eldr_serve.experts.signature import unpack_counts
from eldr_serve.scheduling.cost import StepSums

# kv_transfer_params that make NIXL's connector hold the prompt's blocks.
_HAND_OVER = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


class VllmEngine:
    """See protocol.Engine.

    Args:
        server: Ray Serve LLM's server; it has been started.
        model_id: the model name that requests use.
    """

    def __init__(self, server: Any, model_id: str) -> None:
        self.server = server
        self._model_id = model_id
        self._held: HeldExperts | None = None
        self._samples = SampleBuffer()

    @classmethod
    async def start(cls, config: Any) -> VllmEngine:
        """Start the engine of an LLMConfig (see VllmBackend.spec).

        Raises:
            UnsupportedEngineError: vLLM is not a supported version, or refuses the model.
            RuntimeError: Ray lacks internal names that this package uses.
        """
        register_connector()
        server = QuietLLMServer.sync_init(config)
        with clear_start():
            await server.start()
        late_metrics.replace_ray_logger(engine_client(server.engine), late_metrics.LateStatLogger)
        check_serving(server.engine)  # fail now rather than at the first request
        engine = cls(server, config.model_id)
        parallel = engine_client(server.engine).vllm_config.parallel_config
        if parallel.enable_expert_parallel and switched_on():
            engine._held = HeldExperts(server.collective_rpc)
            await engine._held.refresh()
        return engine

    async def prefill(self, request: EngineRequest) -> Prefilled:
        """See protocol.Engine."""
        parsed = parse_request(replace(request, kv=_HAND_OVER | {REQUEST: request.id}))
        raw_request, generated = _raw_request(parsed, request), _ids(request.generated)
        output = await first_token(self.server.engine, request.method, parsed, raw_request, generated)
        ids = output.prompt_token_ids[: len(output.prompt_token_ids) - len(generated)]
        kv = output.kv_transfer_params or {}
        if (created := getattr(output, "num_cache_creation_tokens", None)) is not None:
            kv[CREATED] = min(created, len(ids))
        return Prefilled(np.asarray(ids, np.uint32), kv)

    async def generate(self, request: EngineRequest, send: Send) -> float | None:
        """See protocol.Engine; the time is unknown with `disable_log_stats`, or if the answer is resumed."""
        called_s = time.monotonic()
        if MEASURED.awaits_counts(request.id):
            request = replace(request, kv={REQUEST: request.id})
        parsed = parse_request(request)
        if request.token_ids:
            set_prompt(parsed, _ids(request.token_ids))
        serving, create = openai_serving(self.server.engine, request.method)
        single: Continuation | None = None
        if _has_one_answer(parsed):
            if request.sampled:
                parsed.kv_transfer_params = {**(parsed.kv_transfer_params or {}), CALIBRATE: True}
            serving, continuation = with_client(
                serving,
                lambda client: Continuation(client, send, parsed, _ids(request.generated), request.created),
            )
            single = continuation
            if parsed.stream and is_plain(serving, parsed):
                write = continuation.write
                wrap_stream(serving, request.method, lambda generator: PlainStream(generator, write))
        answer = await getattr(serving, create)(parsed, _raw_request(parsed, request))
        if not isinstance(answer, AsyncGenerator):
            body, tokens = _body(answer)
            if single is None:
                send(body, tokens)
                return None
            single.end(body)
            self._keep_sample(request, single)
            return _queued_s(single, called_s)
        begun = False
        async for chunk in answer:
            if not begun and chunk.startswith('data: {"error"'):
                _refuse_streamed(chunk)
            begun = True
            if single is None:
                send(chunk.encode(), generated_tokens(chunk))
            else:
                single.write(chunk.encode())
        if single is None:
            return None
        single.end()
        self._keep_sample(request, single)
        return _queued_s(single, called_s)

    def _keep_sample(self, request: EngineRequest, single: Continuation) -> None:
        counts = single.counts
        if request.sampled and counts:
            prefill = request.expert_counts or counts.get("eldr_prefill", "")
            ids = np.asarray(single.prompt_token_ids, np.uint32)
            self._samples.put(request, ids, prefill, counts["eldr_decode"], counts["eldr_decode_steps"])

    async def expert_counts(self, request_id: str) -> tuple[int, str]:
        """See protocol.Engine; never returns with `disable_log_stats`."""
        return await MEASURED.counts_of(request_id)

    async def answer(self, request: EngineRequest, send: Send) -> None:
        """See protocol.Engine."""
        if request.method not in ENDPOINT_REQUESTS:
            raise Refused(f"an engine has no call {request.method!r}", status=400)
        parsed = parse_request(request)
        if request.method in ("tokenize", "detokenize"):
            serving, create = openai_serving(self.server.engine, request.method)
            send(*_body(await getattr(serving, create)(parsed, _raw_request(parsed, request))))
            return
        info = RawRequestInfo(headers=request.headers)
        async for response in await getattr(self.server, request.method)(parsed, info):
            send(*_body(response))

    async def release(self, request_id: str) -> None:
        """See protocol.Engine."""
        await self.server.collective_rpc("eldr_abandon", args=([request_id],))

    async def shape(self) -> tuple[int, int]:
        """See protocol.Engine."""
        body = {"model": self._model_id, "prompt": "count the experts of this prompt"}
        first = EngineRequest("completions", json.dumps(body).encode(), f"start-{uuid.uuid4().hex}")
        try:
            found = await self.prefill(first)
        except Exception as error:
            raise ConfigurationError(
                f"the prefill engine of {self._model_id!r} failed its first prompt: {sentence(error)}"
            ) from error
        try:
            layers, experts = unpack_counts(found.kv[EXPERT_COUNTS]).shape
        except (KeyError, ValueError) as error:
            raise ConfigurationError(
                f"the prefill engine of {self._model_id!r} (vLLM {vllm.__version__}) answered its first "
                "prompt without expert counts, so requests would be placed by load alone: leave "
                "kv_connector, kv_role and scheduler_cls in prefill_config's engine_kwargs to eldr-serve"
            ) from error
        await self.release(first.id)
        return layers, experts

    async def place_experts(
        self, placement: ExpertPlacement, load: ArrayLike | None = None
    ) -> dict[str, Any]:
        """See protocol.Engine."""
        if self._held is None:
            raise Refused(
                "this engine's experts cannot be moved: it does not run eldr-serve's expert parallelism",
                status=400,
            )
        return await self._held.place(placement, load)

    def experts(self) -> dict[str, Any] | None:
        """See protocol.Engine."""
        return None if self._held is None else self._held.status

    def kv_usage(self) -> float:
        """See protocol.Engine."""
        return MEASURED.kv_usage

    def prefix_cache(self) -> tuple[int, int]:
        """See protocol.Engine."""
        return prefix_cache(engine_client(self.server.engine).vllm_config)

    def slots(self) -> int:
        """See protocol.Engine."""
        return int(engine_client(self.server.engine).vllm_config.scheduler_config.max_num_seqs)

    def take_steps(self) -> StepSums:
        """See protocol.Engine."""
        return MEASURED.take_steps()

    def take_samples(self) -> list[ExpertSample]:
        """See protocol.Engine; an engine that drafts tokens records no samples."""
        return self._samples.take()

    @staticmethod
    def status_of(error: Exception) -> int:
        """See protocol.Engine."""
        if isinstance(error, ValidationError):
            return 400
        return int(create_error_response(error).error.code)

    @staticmethod
    def parameter_of(error: Exception) -> str | None:
        """See protocol.Engine."""
        return parameter_of(error)

    async def ping(self) -> None:
        """See protocol.Engine; this is the cheapest call that the core answers between two steps."""
        await engine_client(self.server.engine).is_sleeping()

    async def check_health(self) -> None:
        """See protocol.Engine."""
        await self.server.check_health()

    async def stop(self) -> None:
        """See protocol.Engine."""
        late_metrics.flush()
        await self.server.engine.shutdown()


def _raw_request(parsed: Any, request: EngineRequest) -> Any:
    info = canonical_request_id(parsed, RawRequestInfo(headers=request.headers))
    return RawRequestInfo.to_starlette_request_optional(info)


def _queued_s(single: Continuation, called_s: float) -> float | None:
    """Return the time from the call to its first step, s; vLLM uses the same monotonic clock."""
    scheduled_s: float = getattr(single.metrics, "scheduled_ts", 0.0)
    return max(scheduled_s - called_s, 0.0) if scheduled_s else None


def _ids(packed: bytes) -> list[int]:
    ids: list[int] = np.frombuffer(packed, np.uint32).tolist()
    return ids


def _has_one_answer(parsed: Any) -> bool:
    several = (parsed.n or 1) > 1 or parsed.use_beam_search
    return not several and not several_prompts(getattr(parsed, "prompt", None))


def _body(response: Any) -> tuple[bytes, int]:
    """Return the JSON body of a response of vLLM or Ray, and its number of generated tokens.

    Raises:
        CallFailed: the response is an error.
    """
    error = getattr(response, "error", None)
    body = response.model_dump_json().encode()
    if error is not None:
        raise CallFailed(int(error.code), body)
    tokens = getattr(getattr(response, "usage", None), "completion_tokens", None)
    return body, int(tokens or 0)


def _refuse_streamed(chunk: str) -> None:
    body = chunk.removeprefix("data: ").strip().encode()
    try:
        code = int(pydantic_core.from_json(body)["error"].get("code") or 500)
    except (ValueError, KeyError, TypeError, AttributeError):
        code = 500
    raise CallFailed(code, body)


def generated_tokens(chunk: str) -> int:
    """Return the number of tokens in an event of vLLM's stream.

    An event has one token. The first event of a chat (the only one with a role), usage and `[DONE]` have
    none. The event is not parsed: quotes within generated text are escaped and do not match.
    """
    return 0 if '"role":' in chunk else chunk.count('"choices":[{')
