"""Engines without any computation, for tests and benchmarks of the serving code."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
from numpy.typing import ArrayLike

from eldr_serve.engine.calls import (
    DECODE_COUNTS_KEY,
    DECODE_STEPS_KEY,
    EXPERT_COUNTS_KEY,
    PREFILL_COUNTS_KEY,
    ROUTES_KEY,
    GenerationReport,
)
from eldr_serve.engine.protocol import EngineRequest, PrefilledPrompt, Sampling, Send
from eldr_serve.engine.routes import pack_routes
from eldr_serve.engine.samples import SampleBuffer
from eldr_serve.errors import RequestRefusedError
from eldr_serve.experts.expert_placement import ExpertPlacement
from eldr_serve.experts.sample import ExpertSample
from eldr_serve.experts.signature import Counts, pack_counts
from eldr_serve.scheduling.cost import StepSums
from eldr_serve.scheduling.prefixes import BlockChanges, PrefixCacheSize


@dataclass(frozen=True)
class FakeConfig:
    """Settings of fake engines.

    Attributes:
        expert_counts: uint32[L,E] each; they are assigned to prompts in turn.
        prompt_tokens: number of tokens of every prompt.
        prefill_s: seconds that a prefill takes.
        step_s: seconds that a decode step takes; all streams get their tokens of a step together.
        prefix_cache: size of the prefix cache; None if the engine has no prefix cache.
        top_k: experts per token; a decode step uses the first k of each layer.
        ranks: number of data-parallel ranks, which behave alike.
    """

    expert_counts: Sequence[Counts] | Counts
    prompt_tokens: int = 8
    prefill_s: float = 0.0
    step_s: float = 0.001
    prefix_cache: PrefixCacheSize | None = None
    top_k: int = 2
    ranks: int = 1
    deployment_config: dict[str, Any] = field(default_factory=dict)


class InProcessEngine:
    """The methods of protocol.Engine that are the same in all engines without processes of their own."""

    async def place_experts(
        self, placement: ExpertPlacement, load: ArrayLike | None = None
    ) -> dict[str, Any]:
        """Refuse: experts cannot be moved."""
        raise RequestRefusedError("this engine's experts cannot be moved", status=400)

    def expert_status(self) -> dict[str, Any] | None:
        """Return None: no experts can be moved."""
        return None

    def ranks(self) -> int:
        """Return 1: no data parallelism."""
        return 1

    def slots(self) -> int | None:
        """Return None: unknown."""
        return None

    def take_prefix_changes(self, *, full: bool) -> BlockChanges | None:
        """Return None: the blocks are not reported."""
        return None

    async def ping(self) -> None:
        """Return at once."""

    async def check_health(self) -> None:
        """Report good health."""


class FakeEngine(InProcessEngine):
    """An implementation of protocol.Engine without a model.

    A completion has tokens 0 to `max_tokens` - 1, one every `gap_ms`; both are fields of the request's body.
    The events of a stream have the format of an OpenAI server; other answers are one JSON body.

    Attributes:
        held_prompts: ids of prompts that were computed and neither read nor released.
        running: ids of calls whose prompt or answer is being computed.
    """

    def __init__(self, config: FakeConfig) -> None:
        self.held_prompts: set[str] = set()
        self.running: set[str] = set()
        self._config = config
        self._packed_counts = itertools.cycle([pack_counts(counts) for counts in config.expert_counts])
        # The answers whose next token comes in a step, by the number of the step.
        self._answers_by_step: defaultdict[int, list[_Answer]] = defaultdict(list)
        self._step_number = 0  # number of the newest step
        self._samples = SampleBuffer()
        self._step_task = asyncio.get_running_loop().create_task(self._step())

    @classmethod
    async def start(cls, config: FakeConfig) -> FakeEngine:
        """Start the engine; the signature is that of VllmEngine.start."""
        return cls(config)

    async def prefill(self, request: EngineRequest) -> PrefilledPrompt:
        """Hold a prompt; the location of its blocks is the request's id."""
        _body_fields(request)
        with self._mark_running(request):
            await asyncio.sleep(self._config.prefill_s)
        self.held_prompts.add(request.id)
        ids = np.zeros(self._config.prompt_tokens, np.uint32)
        return PrefilledPrompt(ids, {"held": request.id, EXPERT_COUNTS_KEY: next(self._packed_counts)})

    async def generate(self, request: EngineRequest, send: Send) -> GenerationReport:
        """Send an answer; no blocks are transferred."""
        body = _body_fields(request)
        gap_steps = max(1, round(body.get("gap_ms", 0) / 1000 / self._config.step_s))
        num_generated = len(request.generated) // 4
        answer = _Answer(
            request.id, send, body.get("max_tokens") or 1, gap_steps, bool(body.get("stream")), num_generated
        )
        self._answers_by_step[self._step_number + 1].append(answer)
        try:
            with self._mark_running(request):
                await answer.ended.wait()
        finally:
            answer.ended.set()
        if request.sampled:
            self._keep_sample(request, answer.tokens - 1)
        return GenerationReport(transport_s=0.0)

    def _keep_sample(self, request: EngineRequest, steps: int) -> None:
        ids = np.frombuffer(request.token_ids, np.uint32)
        if not len(ids):
            ids = np.zeros(self._config.prompt_tokens, np.uint32)
        prefill = request.expert_counts or next(self._packed_counts)
        decode = _decode_counts(self._config.expert_counts[0].shape, steps, self._config.top_k)
        self._samples.put(request, ids, prefill, pack_counts(decode), steps)

    async def wait_for_counts(self, request_id: str) -> tuple[int, str]:
        """Return the next configured expert counts."""
        await asyncio.sleep(self._config.prefill_s)
        return self._config.prompt_tokens, next(self._packed_counts)

    async def serve_endpoint(self, request: EngineRequest, send: Send) -> None:
        """Refuse: this engine has no such endpoints."""
        raise RequestRefusedError(f"an engine has no call {request.method!r}", status=400)

    async def release(self, request_id: str) -> None:
        """Remove a prompt that is held."""
        self.held_prompts.discard(request_id)

    async def measure_shape(self) -> tuple[int, int]:
        """Return the shape of the configured counts."""
        layers, experts = self._config.expert_counts[0].shape
        return layers, experts

    def ranks(self) -> int:
        """Return the number of ranks, as configured."""
        return self._config.ranks

    def kv_usage(self, rank: int | None = None) -> float:
        """Return 0: there is no KV cache."""
        return 0.0

    def prefix_cache(self) -> PrefixCacheSize | None:
        """Return tokens per block, and tokens of the KV cache, as configured."""
        return self._config.prefix_cache

    def take_steps(self, rank: int = 0) -> StepSums:
        """Return sums of zero."""
        return StepSums()

    def take_samples(self) -> list[ExpertSample]:
        """Return the samples since the last call."""
        return self._samples.take_all()

    def status_of(self, error: Exception) -> int:
        """Return 400 for malformed JSON, else 500."""
        return 400 if isinstance(error, msgspec.DecodeError) else 500

    def parameter_of(self, error: Exception) -> str | None:
        """Return None: no parameter is known."""
        return None

    async def stop(self) -> None:
        """End the steps."""
        self._step_task.cancel()

    @contextmanager
    def _mark_running(self, request: EngineRequest) -> Iterator[None]:
        self.running.add(request.id)
        try:
            yield
        finally:
            self.running.discard(request.id)

    async def _step(self) -> None:
        started_at_s = time.monotonic()
        while True:
            await asyncio.sleep(
                started_at_s + (self._step_number + 1) * self._config.step_s - time.monotonic()
            )
            self._step_number += 1
            for answer in self._answers_by_step.pop(self._step_number, ()):
                if answer.step():
                    self._answers_by_step[self._step_number + answer.gap_steps].append(answer)


class FakeTokenizer:
    """A tokenizer with one token per byte."""

    chat_template = None

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text."""
        return list(text.encode())


class FakeCalibrationEngine:
    """An implementation of protocol.CalibrationEngine without a model.

    Args:
        config: the configuration; its expert counts are assigned to prompts in turn.
        max_model_len: maximum number of tokens of a prompt and its answer.
    """

    def __init__(self, config: FakeConfig, max_model_len: int = 64) -> None:
        self.max_model_len = max_model_len
        self._expert_counts = itertools.cycle(config.expert_counts)
        self._top_k = config.top_k

    @property
    def tokenizer(self) -> FakeTokenizer:
        """Return a tokenizer of bytes."""
        return FakeTokenizer()

    def calibrate(self, prompts: Sequence[list[int]], sampling: Sequence[Sampling]) -> list[dict[str, Any]]:
        """Return a record per prompt; prefill makes the first token of an answer."""
        return [self._calibrate_one(*pair) for pair in zip(prompts, sampling, strict=True)]

    def _calibrate_one(self, prompt: list[int], sampling: Sampling) -> dict[str, Any]:
        counts = np.asarray(next(self._expert_counts))
        layers, experts = counts.shape
        steps = sampling.max_tokens - 1
        routes = np.broadcast_to(np.arange(self._top_k), (steps, layers, self._top_k))
        decode = _decode_counts((layers, experts), steps, self._top_k)
        return {
            "token_ids": prompt,
            PREFILL_COUNTS_KEY: pack_counts(counts),
            DECODE_COUNTS_KEY: pack_counts(decode),
            DECODE_STEPS_KEY: steps,
            ROUTES_KEY: pack_routes(routes) if sampling.routes else None,
        }


@dataclass(eq=False)
class _Answer:
    """An answer in progress, which gets one token in each of its steps."""

    name: str
    send: Send
    tokens: int
    gap_steps: int
    stream: bool
    num_generated: int = 0
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    def step(self) -> bool:
        """Send the next token; return whether more follow."""
        if self.ended.is_set():  # the call was cancelled
            return False
        token = self.num_generated.to_bytes(4, "little")
        self.num_generated += 1
        ends = self.num_generated == self.tokens
        if self.stream:
            end = b"data: [DONE]\n\n" if ends else b""
            self.send(b"data: " + self._body(" token") + b"\n\n" + end, 1, token)
        else:
            self.send(self._body(" token" * self.tokens) if ends else b"", 1, token)
        if ends:
            self.ended.set()
        return not ends

    def _body(self, text: str) -> bytes:
        return msgspec.json.encode({"id": self.name, "choices": [{"index": 0, "text": text}]})


def _decode_counts(shape: tuple[int, ...], steps: int, top_k: int) -> Counts:
    counts = np.zeros(shape, np.uint32)
    counts[:, :top_k] = steps
    return counts


def _body_fields(request: EngineRequest) -> dict[str, Any]:
    """Return the fields of the request's body; raise DecodeError if it is not a JSON object."""
    return msgspec.json.decode(request.body, type=dict[str, Any])
