"""The prefill and decode deployments, for any engine: a replica's channel, and hooks that Serve calls."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from functools import partial
from typing import Any, ClassVar

import msgspec

from eldr_serve.channel import CallFailedError, Reply
from eldr_serve.channel.address import MAX_CALLS, start_channel_server
from eldr_serve.engine import methods
from eldr_serve.engine.calls import WARM_UP_ID_PREFIX, GenerationReport, PrefillReply
from eldr_serve.engine.protocol import (
    Engine,
    EngineConfig,
    EngineRequest,
    PrefilledPrompt,
    Send,
    ServesRequests,
)
from eldr_serve.engine.report_fields import (
    ADDRESS,
    BLOCK_TOKENS,
    EXPERTS,
    KV_USAGE,
    QUEUE,
    RANKS,
    REPORT_NUMBER,
    SLOTS,
)
from eldr_serve.errors import RequestRefusedError, error_body, one_line_message
from eldr_serve.monitoring.loop_watch import LoopWatch
from eldr_serve.monitoring.supervision import start_supervised
from eldr_serve.queues.reports import PromptMeter
from eldr_serve.replicas.autoscaling import IN_FLIGHT, KV_IN_USE
from eldr_serve.replicas.decode_reporter import DecodeReporter
from eldr_serve.replicas.engine_watch import EngineWatch
from eldr_serve.replicas.expert_placement import ExpertPlacementFollower, place_experts
from eldr_serve.replicas.log_handlers import restore_log_handlers
from eldr_serve.replicas.rank_loads import RankLoad
from eldr_serve.replicas.sample_sender import SampleSender
from eldr_serve.replicas.sampling import Sampler, send_samples

logger = logging.getLogger(__name__)


class EngineServer:
    """A replica of a Ray Serve deployment: an engine that is called through its channel.

    Args:
        llm_config: the engine's settings; Ray Serve LLM uses this name.
        start_engine: coroutine function that starts an engine with these settings.
        stall_timeout_s: time after which an engine whose core does not answer counts as hung, s.
    """

    _engine: Engine
    _role: ClassVar[str]

    async def __init__(  # type: ignore[misc]
        self,
        llm_config: EngineConfig,
        *,
        start_engine: Callable[[Any], Awaitable[Engine]],
        stall_timeout_s: float,
    ) -> None:
        # Serve awaits `__del__` before it stops the replica. If it were a method of the class, Python would
        # call it again when the object is freed, and nothing would await that coroutine.
        self.__del__ = self.shut_down
        self._report_numbers = itertools.count()
        self._meter = PromptMeter(clock=asyncio.get_running_loop().time)
        with restore_log_handlers():
            self._engine = await start_engine(llm_config)
        self._tasks = [start_supervised("the event-loop monitor", LoopWatch(self._role).run)]
        max_calls = int(llm_config.deployment_config.get("max_ongoing_requests") or MAX_CALLS)
        self._address, self._channel_server = await start_channel_server(
            self._on_call,
            error_response=self._error_response,
            max_calls=max_calls,
            limited_methods=methods.SLOT_METHODS,
            report=self.report,
        )
        self._engine_watch = EngineWatch(self._engine, self._channel_server, self._role, stall_timeout_s)
        self._tasks.append(start_supervised("the engine monitor", self._engine_watch.run))

    async def _on_call(self, method: str, header: dict[str, Any], _body: bytes, reply: Reply) -> None:
        """Handle a call, and record that the engine has answered a client."""
        request = msgspec.convert(header, EngineRequest)
        await self.handle_call(method, request, reply)
        if not self._engine_watch.has_answered and method in methods.SLOT_METHODS:
            self._engine_watch.has_answered = _is_from_client(request)

    async def handle_call(self, method: str, request: EngineRequest, reply: Reply) -> None:
        """Handle a call of an ingress replica."""
        if method == methods.GENERATE:
            report = await self.generate(request, reply.send)
            reply.engine_report = msgspec.to_builtins(report)
        else:
            await self._engine.serve_endpoint(request, reply.send)

    async def generate(self, request: EngineRequest, send: Send) -> GenerationReport:
        """Send the engine's answer; return its report on the call."""
        return await self._engine.generate(request, send)

    def _error_response(self, method: str, error: Exception) -> tuple[int, bytes]:
        status, body = describe_error(method, error, self._engine)
        if status >= 500 and not isinstance(error, RequestRefusedError):
            self._engine_watch.check_soon()
        return status, body

    async def record_replica_metadata(self) -> dict[str, Any]:
        """Return the address for ingress replicas; called by Serve."""
        return {ADDRESS: asdict(self._address)}

    def report(self) -> dict[str, Any]:
        """Return the status report for pings: KV cache usage, prefill queue, and experts of parallel ranks.

        Serve's routing stats are not used: the controller would poll a dead replica every period until the
        next health check and log a traceback for each failure.
        """
        calls, number = self._channel_server.count_calls(methods.SLOT_METHODS), next(self._report_numbers)
        values = self._report_load(number, self._meter, calls, self._engine.kv_usage())
        experts = self._engine.expert_status()
        return values if experts is None else values | {EXPERTS: experts}

    def _report_load(self, number: int, meter: PromptMeter, calls: int, kv_usage: float) -> dict[str, Any]:
        queue = meter.report(number, num_ingresses=self._channel_server.num_peers, calls=calls)
        return {KV_USAGE: kv_usage, REPORT_NUMBER: number, QUEUE: asdict(queue)}

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Return loads that Serve cannot count itself; called by Serve."""
        in_flight = float(self._channel_server.count_calls(methods.SLOT_METHODS))
        return {IN_FLIGHT: in_flight, KV_IN_USE: self._engine.kv_usage()}

    async def check_health(self) -> None:
        """Raise if the replica must be replaced; called by Serve."""
        await self._engine.check_health()
        if self._engine_watch.lost_reason is not None:
            raise RuntimeError(f"the engine is lost: {self._engine_watch.lost_reason}")

    async def shut_down(self) -> None:
        """Drain the streams, then stop the engine."""
        channel, engine = getattr(self, "_channel_server", None), getattr(self, "_engine", None)
        if channel is not None:
            await channel.drain()
        for task in getattr(self, "_tasks", []):
            task.cancel()
        if engine is not None:
            await engine.stop()


class PrefillServer(EngineServer):
    """An engine that computes prompts for decode engines, and frees KV blocks that none of them will read.

    A finished prompt's blocks are held until the decode engine has read them or the lease
    (`kv_lease_duration`, s) ends. If the client disconnects in between, a `release` call frees them at once.

    Raises:
        ConfigurationError: the engine counts no experts, so requests would be placed by load alone.
    """

    _role = "prefill"

    async def __init__(self, llm_config: EngineConfig, **kwargs: Any) -> None:  # type: ignore[misc]
        await super().__init__(llm_config, **kwargs)
        layers, experts = await self._engine.measure_shape()
        logger.info("the engine counts %d experts in each of %d layers", experts, layers)

    async def handle_call(self, method: str, request: EngineRequest, reply: Reply) -> None:
        """Handle the calls of an EngineServer, prefill calls (see PrefillReply) and releases."""
        if method == methods.PREFILL:
            prefilled = await self._prefill(request)
            values = PrefillReply(prefilled.token_ids.tobytes(), prefilled.kv_transfer_params)
            reply.send(msgspec.msgpack.encode(values), 1)
        elif method == methods.RELEASE:
            await self._engine.release(request.id)
        else:
            await super().handle_call(method, request, reply)

    async def _prefill(self, request: EngineRequest) -> PrefilledPrompt:
        """Compute a prompt and measure its throughput."""
        tokens, computed = request.tokens_to_compute, 0
        self._meter.enter(tokens)
        try:
            prefilled = await self._engine.prefill(request)
            computed = len(prefilled.token_ids) + len(request.generated) // 4
        finally:
            self._meter.leave(tokens, computed if tokens else 0)
        return prefilled


class DecodeServer(EngineServer):
    """A decode engine, or one that also prefills.

    It reports the costs of its steps and changes of its prefix cache to the router, and samples of its
    requests to the signature pool. If its engine has data-parallel ranks, each rank is a worker of the router
    with its own reports.

    Args:
        application, num_pool_actors: determine the names of the pool's actors (see SampleSender). Without
            actors nothing is sampled.
        follows_expert_placements: whether the router has expert placements, one for each position.
    """

    _role = "decode"

    async def __init__(  # type: ignore[misc]
        self,
        llm_config: EngineConfig,
        *,
        router_name: str,
        application: str = "",
        num_pool_actors: int = 0,
        follows_expert_placements: bool = False,
        **kwargs: Any,
    ) -> None:
        self._expert_placement_follower: ExpertPlacementFollower | None = None
        self._sampler = Sampler(1.0 if num_pool_actors else 0.0)
        await super().__init__(llm_config, **kwargs)
        clock = asyncio.get_running_loop().time
        self._rank_loads = [RankLoad(clock) for _ in range(self._engine.ranks())]
        self._reporter = DecodeReporter(self._engine, router_name, lambda: self._channel_server.in_flight)
        self._tasks.append(start_supervised("the reports to the router", self._reporter.run))
        if follows_expert_placements:
            self._expert_placement_follower = ExpertPlacementFollower(self._engine, router_name)
            follow = self._expert_placement_follower.run
            self._tasks.append(start_supervised("the expert-placement follower", follow))
        if num_pool_actors:
            self._pool = SampleSender(application, num_pool_actors)
            send = partial(send_samples, self._engine, self._sampler, self._pool)
            self._tasks.append(start_supervised("the report of samples", send))

    async def record_replica_metadata(self) -> dict[str, Any]:
        """Return the metadata of an EngineServer, and prefix block size, slots and ranks for ingresses."""
        cache = self._engine.prefix_cache()
        own = {BLOCK_TOKENS: 0 if cache is None else cache.block_tokens, SLOTS: self._engine.slots() or 0}
        return await super().record_replica_metadata() | own | {RANKS: self._engine.ranks()}

    def report(self) -> dict[str, Any]:
        """Return the status report of an EngineServer, or a report for each data-parallel rank."""
        if self._engine.ranks() == 1:
            report = super().report()
            if self._expert_placement_follower is not None and EXPERTS in report:
                report[EXPERTS] = report[EXPERTS] | self._expert_placement_follower.status
            return report
        number = next(self._report_numbers)
        loads = enumerate(self._rank_loads)
        return {
            RANKS: [
                self._report_load(number, load.meter, load.calls, self._engine.kv_usage(rank))
                for rank, load in loads
            ]
        }

    async def handle_call(self, method: str, request: EngineRequest, reply: Reply) -> None:
        """Handle the calls of an EngineServer and the calls for counts, placements and draining."""
        if method == methods.WAIT_FOR_COUNTS:
            reply.send(msgspec.msgpack.encode(await self._engine.wait_for_counts(request.id)))
        elif method == methods.PLACE_EXPERTS:
            reply.send(await place_experts(self._engine, request.body), 0)
        elif method == methods.DRAIN:
            self._channel_server.leave()
            reply.send(msgspec.msgpack.encode(self._channel_server.count_calls(methods.SLOT_METHODS)))
        else:
            await super().handle_call(method, request, reply)

    async def generate(self, request: EngineRequest, send: Send) -> GenerationReport:
        """Serve a request. Measure its prompt if this engine prefills it, and sample some requests."""
        with ExitStack() as stack:
            meter = self._meter
            if request.rank is not None:
                load = self._rank_loads[request.rank]
                stack.enter_context(load.track_call())
                meter = load.meter
            if request.tokens_to_compute:
                send = stack.enter_context(_measure_prompt(meter, request.tokens_to_compute, send))
            # A sample covers an answer from its first token.
            if _is_from_client(request) and not request.generated:
                sampled = stack.enter_context(self._sampler.track(request.id))
                request = msgspec.structs.replace(request, sampled=sampled)
            return await super().generate(request, send)

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Return an EngineServer's loads, with this replica's share of waiting requests; called by Serve."""
        stats = await super().record_autoscaling_stats()
        return stats | {IN_FLIGHT: stats[IN_FLIGHT] + self._reporter.queued}


@contextmanager
def _measure_prompt(meter: PromptMeter, tokens_to_compute: float, send: Send) -> Iterator[Send]:
    """Measure the throughput of a prompt, which has been computed at the first call of the new `send`."""
    is_computing = True

    def end(computed: float) -> None:
        nonlocal is_computing
        if is_computing:
            is_computing = False
            meter.leave(tokens_to_compute, computed)

    def end_and_send(payload: bytes, tokens: int, ids: bytes = b"") -> None:
        end(tokens_to_compute)
        send(payload, tokens, ids)

    meter.enter(tokens_to_compute)
    try:
        yield end_and_send
    finally:
        end(0.0)


def _is_from_client(request: EngineRequest) -> bool:
    """Return whether a client sent the request, and not the warm-up."""
    return bool(request.id) and not request.id.startswith(WARM_UP_ID_PREFIX)


def describe_error(method: str, error: Exception, engine: ServesRequests) -> tuple[int, bytes]:
    """Return the HTTP status and the response body for an exception of a call to the engine."""
    if isinstance(error, CallFailedError):
        return error.status, error.body
    if isinstance(error, RequestRefusedError):
        return error.status, error_body(str(error), error.status, param=error.param)
    status = engine.status_of(error)
    if status >= 500:
        logger.error("the call %s failed", method, exc_info=error)
    return status, error_body(one_line_message(error), status, param=engine.parameter_of(error))
