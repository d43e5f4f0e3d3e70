"""The two engine deployments, over whatever engine: its channel, and what Serve asks of a replica."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from typing import Any, ClassVar

import msgspec
from ray import serve
from ray.exceptions import ActorDiedError, RayError

from eldr_serve.channel import Answer, CallFailed
from eldr_serve.engine.protocol import Engine, EngineConfig, EngineRequest, Prefilled
from eldr_serve.errors import Refused, error_body, sentence
from eldr_serve.routing.cost import StepSums
from eldr_serve.serving import expert_swap, true_signature
from eldr_serve.serving.address import MAX_CALLS, open_channel
from eldr_serve.serving.autoscaling import IN_FLIGHT, KV_IN_USE
from eldr_serve.serving.budget import KV_USAGE, SAMPLE
from eldr_serve.serving.decode_router import find
from eldr_serve.serving.decode_turns import SEATS
from eldr_serve.serving.engine_watch import EngineWatch
from eldr_serve.serving.fleet import METADATA
from eldr_serve.serving.kept_log import kept_log
from eldr_serve.serving.loop_watch import LoopWatch
from eldr_serve.serving.prefill_queue import QUEUE, Meter
from eldr_serve.serving.replicas import BLOCK_TOKENS, EXPERTS
from eldr_serve.serving.wire import WAITED_S, WARM

logger = logging.getLogger(__name__)

_REPORT_PERIOD_S = 1.0


class EngineServer:
    """A replica of a Ray Serve deployment: an engine that is called through its channel.

    Args:
        llm_config: the engine's settings, by the name that Ray Serve LLM binds them under.
        engine: starts one.
        stall_limit_s: see EngineWatch.
    """

    _engine: Engine
    _role: ClassVar[str]

    async def __init__(  # type: ignore[misc]
        self,
        llm_config: EngineConfig,
        *,
        engine: Callable[[Any], Awaitable[Engine]],
        stall_limit_s: float,
    ) -> None:
        self._samples = itertools.count()
        self._meter = Meter(clock=asyncio.get_running_loop().time)
        with kept_log():
            self._engine = await engine(llm_config)
        self._watch = asyncio.get_running_loop().create_task(LoopWatch(self._role).run())
        limit = int(llm_config.deployment_config.get("max_ongoing_requests") or MAX_CALLS)
        self._address, self._channel = await open_channel(self._answer, describe=self._describe, limit=limit)
        self._life = EngineWatch(self._engine, self._channel, self._role, stall_limit_s)
        self._watching = asyncio.get_running_loop().create_task(self._life.run())

    async def _answer(self, method: str, header: dict[str, Any], body: bytes, answer: Answer) -> None:
        await self.answer(method, header, body, answer)
        if not self._life.proven and method in ("prefill", "generate"):
            self._life.proven = not header.get("id", WARM).startswith(WARM)

    async def answer(self, method: str, header: dict[str, Any], body: bytes, answer: Answer) -> None:
        """Answer a call of an ingress replica."""
        if method == "generate":
            waited_s = await self._engine.generate(EngineRequest(body=body, **header), answer.send)
            if waited_s is not None:
                answer.about = {WAITED_S: waited_s}
        else:
            await self._engine.answer(EngineRequest(method, body, **header), answer.send)

    def _describe(self, error: Exception) -> tuple[int, bytes]:
        status, body = describe(error, self._engine.status_of)
        if status >= 500 and not isinstance(error, Refused):
            self._life.failed()
        return status, body

    async def record_replica_metadata(self) -> dict[str, Any]:
        """Serve's hook: how ingress replicas reach this one."""
        return {METADATA: asdict(self._address)}

    async def record_routing_stats(self) -> dict[str, Any]:
        """Serve's hook, called every SAMPLE_PERIOD_S: how full the KV cache is, what waits for prefill, and
        what expert-parallel ranks hold."""
        number = next(self._samples)
        callers, calls = len(self._channel.connections), self._channel.in_flight
        queue = self._meter.report(number, callers=callers, calls=calls)
        found = {KV_USAGE: self._engine.kv_usage(), SAMPLE: number, QUEUE: queue}
        experts = self._engine.experts()
        return found if experts is None else found | {EXPERTS: experts}

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Serve's hook: what it cannot count itself."""
        return {IN_FLIGHT: float(self._channel.in_flight), KV_IN_USE: self._engine.kv_usage()}

    async def check_health(self) -> None:
        """Serve's hook: raises if the replica must be replaced."""
        await self._engine.check_health()
        if self._life.lost is not None:
            raise RuntimeError(f"the engine is lost: {self._life.lost}")

    async def __del__(self) -> None:
        """Serve's hook before it ends the replica: streams end first."""
        channel, engine = getattr(self, "_channel", None), getattr(self, "_engine", None)
        if channel is not None:
            await channel.drain()
            self._watching.cancel()
        if engine is not None:
            await engine.stop()


class PrefillServer(EngineServer):
    """Computes the prompts that are handed over, and frees KV blocks that no decode engine will read.

    A finished prefill's blocks are held until the decode engine has read them or the lease
    (`kv_lease_duration`, s) ends. If the client goes away in between, call `release` frees them at once.
    Its routing stats say how full the KV cache is (see PrefillBudget).

    Raises:
        ConfigurationError: the engine counts no experts. Requests would be served, and placed by load alone.
    """

    _role = "prefill"

    async def __init__(self, llm_config: EngineConfig, **kwargs: Any) -> None:  # type: ignore[misc]
        await super().__init__(llm_config, **kwargs)
        layers, experts = await self._engine.shape()
        logger.info("the engine counts %d experts in each of %d layers", experts, layers)

    async def answer(self, method: str, header: dict[str, Any], body: bytes, answer: Answer) -> None:
        """As an EngineServer, and the calls that only prefill engines take.

        To `prefill` the answer is what decode and placement need, as msgpack: `tokens` (of the prompt),
        `token_ids` (uint32 bytes), `kv` (see protocol.Prefilled).
        """
        if method == "prefill":
            found = await self._prefill(EngineRequest(body=body, **header))
            ids = found.token_ids
            said = {"tokens": len(ids), "token_ids": ids.tobytes(), "kv": found.kv}
            answer.send(msgspec.msgpack.encode(said), 1)
        elif method == "release":
            await self._engine.release(header["id"])
        else:
            await super().answer(method, header, body, answer)

    async def _prefill(self, request: EngineRequest) -> Prefilled:
        """Compute a prompt, and measure how long that takes."""
        tokens, computed = request.prompt_tokens, 0
        self._meter.enter(tokens)
        try:
            found = await self._engine.prefill(request)
            computed = len(found.token_ids) + len(request.generated) // 4
        finally:
            self._meter.leave(tokens, computed if tokens else 0)
        return found


class DecodeServer(EngineServer):
    """A decode engine, or a whole one, that tells the router what its steps cost and its cache holds."""

    _role = "decode"

    async def __init__(  # type: ignore[misc]
        self, llm_config: EngineConfig, *, router_name: str, **kwargs: Any
    ) -> None:
        await super().__init__(llm_config, **kwargs)
        self._router_name = router_name
        self._queued = 0.0  # requests that wait in the router for a worker, this one's share
        self._reporter = asyncio.get_running_loop().create_task(self._report_steps())

    async def record_replica_metadata(self) -> dict[str, Any]:
        """As an EngineServer, the size of a prefix block, since ingress replicas cut prompts alike, and the
        seats."""
        own = {BLOCK_TOKENS: self._engine.prefix_cache()[0], SEATS: self._engine.seats()}
        return await super().record_replica_metadata() | own

    async def answer(self, method: str, header: dict[str, Any], body: bytes, answer: Answer) -> None:
        """As an EngineServer, the call that whole engines take (see true_signature), and that of a swap of
        experts (see expert_swap)."""
        tokens = header.get("prompt_tokens", 0.0)  # of a prompt that this engine prefills
        if tokens:
            await self._measured(tokens, method, header, body, answer)
        elif method == true_signature.METHOD:
            answer.send(msgspec.msgpack.encode(await self._engine.signature(header["id"])))
        elif method == expert_swap.METHOD:
            answer.send(await expert_swap.place(self._engine, body), 0)
        else:
            await super().answer(method, header, body, answer)

    async def _measured(
        self, tokens: float, method: str, header: dict[str, Any], body: bytes, answer: Answer
    ) -> None:
        """Answer a call, and measure how long its prompt takes, which is computed at its first token."""
        send, computing = answer.send, True

        def over(computed: float) -> None:
            nonlocal computing
            if computing:
                computing = False
                self._meter.leave(tokens, computed)

        def sent(payload: bytes, tokens_in_it: int = 0, ids: bytes = b"") -> None:
            over(tokens)
            send(payload, tokens_in_it, ids)

        self._meter.enter(tokens)
        answer.send = sent  # type: ignore[assignment, method-assign]
        try:
            await super().answer(method, header, body, answer)
        finally:
            over(0.0)

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """As an EngineServer; requests that wait for a decode engine count as those that it has."""
        stats = await super().record_autoscaling_stats()
        return stats | {IN_FLIGHT: stats[IN_FLIGHT] + self._queued}

    async def _report_steps(self) -> None:
        router: Any = None  # an actor's handle
        sums = StepSums()  # not reported yet
        while True:
            await asyncio.sleep(_REPORT_PERIOD_S)
            sums = sums + self._engine.take_steps()
            if not sums.steps:
                self._queued = 0.0  # who waits, waits for engines that work
                continue
            try:
                if router is None:  # a thread looks it up: that blocks while GCS is away
                    router = await asyncio.to_thread(find, self._router_name)
                replica = serve.get_replica_context().replica_id.unique_id
                self._queued = await router.observe_steps.remote(sums, replica, self._engine.prefix_cache())
                sums = StepSums()
            except (ValueError, RayError) as error:  # the router is away
                self._queued = 0.0
                if isinstance(error, ActorDiedError):  # for good: a restart keeps its handle
                    router = None
                logger.info("step costs not reported: %r", error)


def describe(error: Exception, status_of: Callable[[Exception], int]) -> tuple[int, bytes]:
    """An exception's status, as of HTTP, and the body that tells it to the client.

    Args:
        status_of: that of what serving does not raise itself, see protocol.Engine.
    """
    if isinstance(error, CallFailed):
        return error.status, error.body
    if isinstance(error, Refused):
        return error.status, error_body(str(error), error.status)
    status = status_of(error)
    if status >= 500:
        logger.error("a call failed", exc_info=error)
    return status, error_body(sentence(error), status)
