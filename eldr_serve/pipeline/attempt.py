"""The steps that answer a request, in their order: prefill, place, decode, release."""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import msgspec

from eldr_serve.channel import Call, CallFailedError, CallTimeoutError, ChannelLostError
from eldr_serve.engine.calls import GenerationReport
from eldr_serve.errors import OverloadedError
from eldr_serve.monitoring.ingress_counters import IngressEvent
from eldr_serve.pipeline.decode_call import DecodeCall
from eldr_serve.pipeline.failures import DecodeFailedError
from eldr_serve.pipeline.prompt import Prompt, UncomputedPrompt
from eldr_serve.pipeline.request_context import RequestContext
from eldr_serve.pipeline.services import Services
from eldr_serve.pipeline.stage import DecodeStages, Stage
from eldr_serve.request import make_placement_request, prompt_key
from eldr_serve.scheduling import Lease, PromptBlocks
from eldr_serve.scheduling.worker_names import replica_of


class Attempt:
    """One attempt to answer a request.

    It owns the prompt's resources, the decode call and the lease, and ends each of them.
    """

    def __init__(self, services: Services, context: RequestContext) -> None:
        self._services = services
        self._context = context
        self._prompt: Prompt = UncomputedPrompt()
        self._call: Call | None = None

    async def run(self) -> AsyncGenerator[bytes, None]:
        """Yield the decode engine's answer: the bytes of a stream as they arrive, or of one response.

        The bytes may end before the answer, which then moves to another engine (see MoveLimiter).

        Raises:
            OverloadedError: no engine can take the request.
            PrefillFailedError: the prefill engine is at fault.
            DecodeFailedError: the answer is not complete.
            CallFailedError: an engine refuses the request itself.
        """
        services = self._services
        context = self._context
        try:
            async with services.retries.permit(context):
                await self._wait_for_decode()
                self._check_slots()
                await services.prefill.tokenise_for_admission(context)
                context.admission = await services.latency_admission.admit(context)
                self._prompt = await services.prefill.prepare(context)
                with context.record.stage("place") as placing:
                    context.lease = lease = await self._place()
            async with aclosing(self._decode(lease, placing)) as payloads:
                async for payload in payloads:
                    yield payload
        finally:
            services.router_client.release(context.request_id)  # no effect without a lease
            self._prompt.close(reader=self._call)

    # -- placement -------------------------------------------------------------------------------

    async def _wait_for_decode(self) -> None:
        """Wait until some decode replica can be reached; raise OverloadedError if none appears."""
        fleet = self._services.fleets.decode
        clock = asyncio.get_running_loop().time
        wait_s = self._services.options.prefill_wait_s
        until_s = clock() + wait_s
        with fleet.waiters.turn() as wait_until:
            while not fleet.live_names:
                if clock() >= until_s:
                    raise OverloadedError(
                        f"no decode replica could be reached for {wait_s:g} s; see `eldr status`"
                    )
                await wait_until(until_s)

    def _check_slots(self) -> None:
        """Raise OverloadedError if a new request would wait too long for a slot of a decode engine."""
        if self._context.is_retry:
            return
        wait_s = self._services.decode_starts.estimate_wait_s()
        bound_s = self._services.options.slot_wait_s
        if wait_s > bound_s:
            self._services.counters.count(IngressEvent.REFUSED_DECODE_BACKLOG)
            why = f"a request would wait {wait_s:.0f} s for a decode engine's slot; {bound_s:g} s are allowed"
            # Spread the retries over the time in which that many slots become free.
            raise OverloadedError(why, retry_after_s=math.ceil(wait_s - bound_s * random.random()))

    async def _place(self) -> Lease:
        context = self._context
        services = self._services
        failed_workers, drained_workers = context.failures.decode_workers, context.drained_workers
        prompt_ids = context.prompt_ids
        request = make_placement_request(
            context.request_id,
            context.request.fields,
            context.request.hints,
            prompt_tokens=len(prompt_ids) if prompt_ids is not None else 0,
            blocks=self._blocks(),
            exclude=self._workers_to_avoid(),
            prompt_key=prompt_key(context.request.fields, context.request.adapter),
            adapter=context.request.adapter,
            tenant=context.request.tenant,
            priority=context.request.priority,
            worker_failed=bool(failed_workers),
            first_token_due_in_s=context.due_in_s,
        )
        moved_or_failed = failed_workers or drained_workers
        # Only first attempts are queued.
        wait_s = 0.0 if moved_or_failed else services.options.queue_timeout_s
        counts = self._prompt.expert_counts
        token_ids = context.predictable_ids
        return await services.router_client.place(request, counts, token_ids=token_ids, wait_s=wait_s)

    def _workers_to_avoid(self) -> tuple[str, ...]:
        """Return the workers to avoid.

        These are workers that failed this request or left while they answered it, other ranks of their
        replicas, ejected workers, and those that would miss the request's objective.
        """
        context, services = self._context, self._services
        past_workers = (*context.failures.decode_workers, *context.drained_workers)
        replicas, usable_workers = set(map(replica_of, past_workers)), set(services.outliers.usable_names)
        live_workers = services.fleets.decode.live_names
        other_workers = (
            name for name in live_workers if name not in usable_workers or replica_of(name) in replicas
        )
        return tuple(dict.fromkeys((*past_workers, *other_workers, *context.admission.late_workers)))

    def _blocks(self) -> PromptBlocks | None:
        """Return the prompt's blocks if the decode engine computes it."""
        prompt_ids = self._prompt.ids_to_compute
        if prompt_ids is None:
            return None
        return self._context.blocks(prompt_ids, self._services.fleets.decode.block_tokens)

    # -- decode ----------------------------------------------------------------------------------

    async def _decode(self, lease: Lease, placing: Stage) -> AsyncGenerator[bytes, None]:
        """Yield the engine's bytes as they arrive, and time the stages.

        Raises:
            DecodeFailedError: the answer is not complete.
            CallFailedError: the engine refuses the request itself.
        """
        context = self._context
        services = self._services
        is_resumed = context.answer.num_tokens > 0
        if is_resumed:
            services.router_client.progress(context.request_id, context.answer.num_tokens)
        with (
            context.record.decode_stages(lease.worker) as stages,
            self._decode_call(lease) as decode,
        ):
            try:
                self._call = decode.send()
                while (chunk := await decode.read()) is not None:
                    context.answer.append(chunk)
                    services.router_client.progress(lease.request_id, context.answer.num_tokens)
                    if stages.first_s is None:
                        self._record_first_chunk(placing, stages)
                        if is_resumed:
                            self._count_resumption()
                    if chunk.payload:  # else only tokens have arrived
                        yield chunk.payload
                    if self._call.is_leaving and services.moves.begin(context, lease.worker):
                        return
            except ChannelLostError as error:
                if decode.call is not None:
                    context.failures.lost_engines += not error.silent
                    self._prompt.on_engine_lost()
                self._raise_unless_complete(error, decode, suspects_prefill=False)
            except CallTimeoutError as error:
                services.outliers.record_failure(lease.worker, error)
                self._raise_unless_complete(error, decode, suspects_prefill=not decode.begun)
            except CallFailedError as error:
                if error.status < 500 and not context.answer.sent and not decode.begun:
                    raise
                if error.status >= 500:  # else the resumed request is at fault, for example too long
                    services.outliers.record_failure(lease.worker, error)
                self._raise_unless_complete(error, decode, suspects_prefill=True)
            else:
                report = msgspec.convert(self._call.engine_report, GenerationReport)
                stages.transport_s = report.transport_s
                if not is_resumed:
                    self._count_cached_tokens(lease, report.cached_tokens)
                if not decode.begun:
                    raise self._decode_failure("the answer was empty", decode, suspects_prefill=True)
                services.outliers.record_success(lease.worker)

    def _decode_call(self, lease: Lease) -> DecodeCall:
        return DecodeCall(
            self._context,
            self._prompt,
            lease,
            fleet=self._services.fleets.decode,
            decode_starts=self._services.decode_starts,
            router_client=self._services.router_client,
            options=self._services.options,
            counts_prompts=self._services.fleets.whole,
        )

    def _record_first_chunk(self, placing: Stage, stages: DecodeStages) -> None:
        record = self._context.record
        stages.first_s = now = time.monotonic()
        if record.first_token_s is None:
            record.first_token_s = now
        if self._context.request.fields.stream:
            record.status = 200
        if self._prompt.prefilled_at_s is not None:
            record.handover_s = now - self._prompt.prefilled_at_s
            self._services.stage_latencies.record(
                place=placing.seconds,
                first_token=now - stages.start_s,
                handover=record.handover_s,
            )

    def _count_resumption(self) -> None:
        """Count an answer that goes on at this engine, and end its move if it has moved."""
        has_moved = self._services.moves.end(self._context.request_id)
        self._services.counters.count(IngressEvent.MOVED if has_moved else IngressEvent.RESUMED)

    def _count_cached_tokens(self, lease: Lease, cached_tokens: float | None) -> None:
        """Count predicted and measured tokens in the prefix cache, if the router has predicted them."""
        if cached_tokens is not None and lease.request.blocks is not None and lease.position >= 0:
            counters = self._services.counters
            counters.count(IngressEvent.PREFIX_TOKENS_PREDICTED, lease.cached_tokens)
            counters.count(IngressEvent.PREFIX_TOKENS_MEASURED, int(cached_tokens))

    def _raise_unless_complete(self, error: Exception, decode: DecodeCall, *, suspects_prefill: bool) -> None:
        """Raise DecodeFailedError, unless the client has the complete answer.

        Args:
            suspects_prefill: the prompt's blocks may be at fault, because the worker's replica reported the
                failure itself or sent no token in time.
        """
        if not self._context.answer.complete:
            raise self._decode_failure(error, decode, suspects_prefill=suspects_prefill) from error

    def _decode_failure(self, reason: Any, call: DecodeCall, *, suspects_prefill: bool) -> DecodeFailedError:
        suspect = self._prompt.prefill_replica if suspects_prefill else ""
        return DecodeFailedError(reason, call.worker, begun=call.begun, suspect_replica=suspect)
