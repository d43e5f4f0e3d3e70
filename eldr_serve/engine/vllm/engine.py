"""The engine of a replica: vLLM, through Ray Serve LLM's server and vLLM's OpenAI endpoints."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import AsyncGenerator, Callable
from typing import Any

import numpy as np
import pydantic_core
import vllm
from msgspec.structs import replace
from numpy.typing import ArrayLike
from pydantic import ValidationError

from eldr_serve.channel import CallFailedError
from eldr_serve.engine.calls import (
    CALIBRATE_KEY,
    CREATED_TOKENS_KEY,
    DECODE_COUNTS_KEY,
    DECODE_STEPS_KEY,
    EXPERT_COUNTS_KEY,
    PREFILL_COUNTS_KEY,
    REQUEST_KEY,
    GenerationReport,
)
from eldr_serve.engine.protocol import EngineRequest, PrefilledPrompt, Send
from eldr_serve.engine.samples import SampleBuffer
from eldr_serve.engine.vllm.compat import buffered_metrics
from eldr_serve.engine.vllm.compat.checked import start_errors
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
    rerank,
    wrap_client,
    wrap_stream,
)
from eldr_serve.engine.vllm.counting_client import CountingClient
from eldr_serve.engine.vllm.ep.swap import EngineExperts, has_live_experts
from eldr_serve.engine.vllm.measurements import MEASUREMENTS
from eldr_serve.engine.vllm.rank_client import RankClient
from eldr_serve.engine.vllm.requests.answer_forms import answer_form, to_events, to_json, to_unstreamed_answer
from eldr_serve.engine.vllm.requests.continuation import Continuation
from eldr_serve.engine.vllm.requests.one_token_prefill import prefill_prompt
from eldr_serve.engine.vllm.requests.plain_stream import PlainStream, is_plain
from eldr_serve.engine.vllm.requests.request_parsing import parse_generation, parse_request, set_prompt
from eldr_serve.errors import ConfigurationError, RequestRefusedError, one_line_message
from eldr_serve.experts.expert_placement import ExpertPlacement
from eldr_serve.experts.sample import ExpertSample
from eldr_serve.experts.signature import unpack_counts
from eldr_serve.request import has_several_prompts
from eldr_serve.scheduling.cost import StepSums
from eldr_serve.scheduling.prefixes import BlockChanges, PrefixCacheSize

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
    """The implementation of protocol.Engine with vLLM behind Ray Serve LLM's server.

    Args:
        server: Ray Serve LLM's server; it has been started.
        model_id: the model name that requests use.
    """

    def __init__(self, server: Any, model_id: str) -> None:
        self.server = server
        self._model_id = model_id
        self._experts: EngineExperts | None = None
        self._samples = SampleBuffer()

    @classmethod
    async def start(cls, config: Any) -> VllmEngine:
        """Start the engine of an LLMConfig (see EngineBackend.spec).

        Raises:
            UnsupportedEngineError: vLLM is not a supported version, or refuses the model.
            RuntimeError: Ray lacks internal names that this package uses.
        """
        register_connector()
        server = QuietLLMServer.sync_init(config)
        with start_errors():
            await server.start()
        buffered_metrics.replace_ray_logger(engine_client(server.engine), buffered_metrics.BufferedStatLogger)
        check_serving(server.engine)  # fail now rather than at the first request
        engine = cls(server, config.model_id)
        # The experts of data-parallel ranks cannot be moved while they serve.
        if has_live_experts(engine_client(server.engine).vllm_config) and engine.ranks() == 1:
            engine._experts = EngineExperts(server.collective_rpc)
            await engine._experts.refresh()
        return engine

    async def prefill(self, request: EngineRequest) -> PrefilledPrompt:
        """Compute a prompt and hold its blocks."""
        request_to_hold = replace(request, kv_transfer_params=_HAND_OVER | {REQUEST_KEY: request.id})
        parsed = await parse_generation(request_to_hold, self.server.engine)
        raw_request, generated = _raw_request(parsed, request), _ids(request.generated)
        output = await prefill_prompt(self.server.engine, request.method, parsed, raw_request, generated)
        ids = output.prompt_token_ids[: len(output.prompt_token_ids) - len(generated)]
        params = output.kv_transfer_params or {}
        if (created := getattr(output, "num_cache_creation_tokens", None)) is not None:
            params[CREATED_TOKENS_KEY] = min(created, len(ids))
        return PrefilledPrompt(np.asarray(ids, np.uint32), params)

    async def generate(self, request: EngineRequest, send: Send) -> GenerationReport:
        """Send an answer; if it is continued, or with `disable_log_stats`, its transport time is unknown."""
        called_at_s = time.monotonic()
        if MEASUREMENTS.awaits_counts(request.id):
            request = replace(request, kv_transfer_params={REQUEST_KEY: request.id})
        parsed = await parse_generation(request, self.server.engine)
        if request.token_ids and not answer_form(request.method).renders_text_alone:
            set_prompt(parsed, _ids(request.token_ids))
        if not _has_one_answer(parsed):
            await self._generate_several(request, parsed, send)
            return GenerationReport()
        if request.sampled:
            parsed.kv_transfer_params = {**(parsed.kv_transfer_params or {}), CALIBRATE_KEY: True}
        continuation = await self._generate_one(request, parsed, send)
        self._keep_sample(request, continuation)
        transport_s = _transport_s(continuation, called_at_s)
        return GenerationReport(transport_s, float(continuation.cached_tokens))

    async def _generate_several(self, request: EngineRequest, parsed: Any, send: Send) -> None:
        """Send an answer with several choices or prompts, which no other engine can continue."""
        serving, create = self._serving_on_rank(request)
        serving, client = wrap_client(serving, CountingClient)
        answer = await getattr(serving, create)(parsed, _raw_request(parsed, request))
        if isinstance(answer, AsyncGenerator):
            await _read_stream(answer, lambda chunk: send(chunk.encode(), client.take_token_count()))
        else:
            send(*_body(answer))

    async def _generate_one(self, request: EngineRequest, parsed: Any, send: Send) -> Continuation:
        """Send an answer that another engine can continue."""
        form = answer_form(request.method)
        serving, create = self._serving_on_rank(request)
        serving, continuation = wrap_client(
            serving,
            lambda client: Continuation(
                client,
                send,
                parsed,
                _ids(request.generated),
                request.created,
                random_ids=form.has_random_ids,
            ),
        )
        if parsed.stream and form.has_plain_streams and is_plain(serving, parsed):
            wrap_stream(serving, request.method, lambda generator: PlainStream(generator, continuation.write))
        answer = await getattr(serving, create)(parsed, _raw_request(parsed, request))
        if isinstance(answer, AsyncGenerator):
            stream = to_events(request.method, serving, answer)
            await _read_stream(stream, lambda chunk: continuation.write(chunk.encode()))
            continuation.end()
        else:
            continuation.end(_body(to_unstreamed_answer(request.method, serving, answer), request.method)[0])
        return continuation

    def _serving_on_rank(self, request: EngineRequest) -> tuple[Any, str]:
        """Return vLLM's serving object that generates on the request's rank, and the object's method."""
        serving, create = openai_serving(self.server.engine, request.method)
        if request.rank is not None:
            rank = request.rank
            serving, _ = wrap_client(serving, lambda client: RankClient(client, rank))
        return serving, create

    def _keep_sample(self, request: EngineRequest, continuation: Continuation) -> None:
        counts = continuation.counts
        if request.sampled and counts:
            prefill = request.expert_counts or counts.get(PREFILL_COUNTS_KEY, "")
            ids = np.asarray(continuation.prompt_token_ids, np.uint32)
            self._samples.put(request, ids, prefill, counts[DECODE_COUNTS_KEY], counts[DECODE_STEPS_KEY])

    async def wait_for_counts(self, request_id: str) -> tuple[int, str]:
        """Wait for a prompt's expert counts; never return with `disable_log_stats`."""
        return await MEASUREMENTS.wait_for_counts(request_id)

    async def serve_endpoint(self, request: EngineRequest, send: Send) -> None:
        """Serve an endpoint that generates nothing."""
        if request.method not in ENDPOINT_REQUESTS:
            raise RequestRefusedError(f"an engine has no call {request.method!r}", status=400)
        parsed = parse_request(request)
        if request.method in ("tokenize", "detokenize", "count_tokens"):
            serving, create = openai_serving(self.server.engine, request.method)
            answer = await getattr(serving, create)(parsed, _raw_request(parsed, request))
            send(*_body(answer, request.method))
            return
        if request.method == "rerank":
            send(await rerank(self.server.engine, parsed, _raw_request(parsed, request)), 0)
            return
        info = RawRequestInfo(headers=request.headers)
        async for response in await getattr(self.server, request.method)(parsed, info):
            send(*_body(response))

    async def release(self, request_id: str) -> None:
        """Free the blocks of a held prompt."""
        await self.server.collective_rpc("eldr_abandon", args=([request_id],))

    async def measure_shape(self) -> tuple[int, int]:
        """Prefill a short prompt and return the shape of its counts."""
        body = {"model": self._model_id, "prompt": "count the experts of this prompt"}
        first = EngineRequest("completions", json.dumps(body).encode(), f"start-{uuid.uuid4().hex}")
        try:
            prefilled = await self.prefill(first)
        except Exception as error:
            raise ConfigurationError(
                f"the prefill engine of {self._model_id!r} failed its first prompt: {one_line_message(error)}"
            ) from error
        try:
            layers, experts = unpack_counts(prefilled.kv_transfer_params[EXPERT_COUNTS_KEY]).shape
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
        """Move the experts to a placement."""
        if self._experts is None:
            raise RequestRefusedError(
                "this engine's experts cannot be moved: it does not run eldr-serve's expert parallelism, or "
                "has data-parallel ranks",
                status=400,
            )
        return await self._experts.place(placement, load)

    def expert_status(self) -> dict[str, Any] | None:
        """Return the state of the expert placement."""
        return None if self._experts is None else self._experts.status

    def ranks(self) -> int:
        """Return vLLM's `data_parallel_size`."""
        return int(engine_client(self.server.engine).vllm_config.parallel_config.data_parallel_size)

    def kv_usage(self, rank: int | None = None) -> float:
        """Return the share of KV blocks in use on a rank, or on the fullest one; 0 before the first step."""
        usage = MEASUREMENTS.kv_usage
        return max([*usage.values()], default=0.0) if rank is None else usage.get(rank, 0.0)

    def prefix_cache(self) -> PrefixCacheSize | None:
        """Return the size of a rank's prefix cache; None without prefix caching."""
        return prefix_cache(engine_client(self.server.engine).vllm_config)

    def take_prefix_changes(self, *, full: bool) -> BlockChanges | None:
        """Return the changes of the prefix cache; None with `disable_log_stats` or data-parallel ranks."""
        return MEASUREMENTS.take_prefix_changes(full=full)

    def slots(self) -> int:
        """Return vLLM's `max_num_seqs`, which holds for each rank."""
        return int(engine_client(self.server.engine).vllm_config.scheduler_config.max_num_seqs)

    def take_steps(self, rank: int = 0) -> StepSums:
        """Return sums over a rank's steps since the last call."""
        return MEASUREMENTS.take_steps(rank)

    def take_samples(self) -> list[ExpertSample]:
        """Return samples since the last call; an engine that drafts tokens records none."""
        return self._samples.take_all()

    @staticmethod
    def status_of(error: Exception) -> int:
        """Return the HTTP status of an error."""
        if isinstance(error, ValidationError):
            return 400
        return int(create_error_response(error).error.code)

    @staticmethod
    def parameter_of(error: Exception) -> str | None:
        """Return the parameter that an error names."""
        return parameter_of(error)

    async def ping(self) -> None:
        """Make the cheapest call that the core answers between two steps."""
        await engine_client(self.server.engine).is_sleeping()

    async def check_health(self) -> None:
        """Raise an error if the engine is dead."""
        await self.server.check_health()

    async def stop(self) -> None:
        """Write buffered metrics and stop the engine."""
        buffered_metrics.flush()
        await self.server.engine.shutdown()


def _raw_request(parsed: Any, request: EngineRequest) -> Any:
    info = canonical_request_id(parsed, RawRequestInfo(headers=request.headers))
    return RawRequestInfo.to_starlette_request_optional(info)


def _transport_s(continuation: Continuation, called_at_s: float) -> float | None:
    """Return the seconds from the call to its first step; vLLM uses the same monotonic clock."""
    scheduled_at_s: float = getattr(continuation.metrics, "scheduled_ts", 0.0)
    return max(scheduled_at_s - called_at_s, 0.0) if scheduled_at_s else None


def _ids(packed: bytes) -> list[int]:
    ids: list[int] = np.frombuffer(packed, np.uint32).tolist()
    return ids


def _has_one_answer(parsed: Any) -> bool:
    has_choices = (getattr(parsed, "n", None) or 1) > 1 or getattr(parsed, "use_beam_search", False)
    return not has_choices and not has_several_prompts(getattr(parsed, "prompt", None))


def _body(response: Any, method: str = "") -> tuple[bytes, int]:
    """Return the JSON body of a response of vLLM or Ray, and its number of generated tokens.

    Args:
        method: the request's method.

    Raises:
        CallFailedError: the response is an error.
    """
    error = getattr(response, "error", None)
    body = to_json(method, response)
    if error is not None:
        raise CallFailedError(int(error.code), body)
    tokens = getattr(getattr(response, "usage", None), "completion_tokens", None)
    return body, int(tokens or 0)


async def _read_stream(answer: AsyncGenerator[str, None], write: Callable[[str], None]) -> None:
    """Pass the chunks of a stream to `write`.

    Raises:
        CallFailedError: the stream begins with an error.
    """
    begun = False
    async for chunk in answer:
        if not begun and chunk.startswith(('data: {"error"', "event: error")):
            raise _stream_error(chunk)
        begun = True
        write(chunk)


def _stream_error(chunk: str) -> CallFailedError:
    body = chunk[chunk.index("data: ") :].removeprefix("data: ").strip().encode()
    try:
        code = int(pydantic_core.from_json(body)["error"].get("code") or 500)
    except (ValueError, KeyError, TypeError, AttributeError):
        code = 500
    return CallFailedError(code, body)
