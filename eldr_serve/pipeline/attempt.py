"""The steps that answer a request, in their order: prefill, place, decode, release."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import msgspec

from eldr_serve.channel import Call, CallFailedError, CallTimeoutError, ChannelLostError
from eldr_serve.engine.calls import GenerationReport
from eldr_serve.metrics import IngressEvent
from eldr_serve.pipeline.decode_call import DecodeCall
from eldr_serve.pipeline.failures import DecodeFailedError
from eldr_serve.pipeline.prompt import Prompt, UncomputedPrompt
from eldr_serve.pipeline.request_context import RequestContext
from eldr_serve.pipeline.services import Services
from eldr_serve.pipeline.stage import DecodeStages, Stage
from eldr_serve.scheduling import Lease


class Attempt:
    """One attempt to answer a request.

    It owns the prompt's resources, the decode call and the lease, and ends each of them.
    """

    def __init__(self, services: Services, context: RequestContext) -> None:
        self._services = services
        self._context = context
        self._prompt: Prompt = UncomputedPrompt()
        self._channel_call: Call | None = None

    async def run(self) -> AsyncGenerator[bytes, None]:
        """Yield the decode engine's answer: the bytes of a stream as they arrive, or of one response.

        If the answer moves to another engine, the bytes end before it is complete (see MoveLimiter).

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
                await services.placement.wait_for_decode()
                services.placement.check_slots(context)
                await services.prefill.tokenise_for_admission(context)
                context.admission = await services.latency_admission.admit(context)
                self._prompt = await services.prefill.prepare(context)
                with context.record.stage("place") as placing:
                    context.lease = lease = await services.placement.place(context, self._prompt)
            async with aclosing(self._decode(lease, placing)) as payloads:
                async for payload in payloads:
                    yield payload
        finally:
            services.router_client.release(context.request_id)  # no effect without a lease
            self._prompt.close(reader=self._channel_call)

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
            self._make_decode_call(lease) as decode_call,
        ):
            try:
                self._channel_call = decode_call.send()
                while (chunk := await decode_call.read()) is not None:
                    context.answer.append(chunk)
                    services.router_client.progress(lease.request_id, context.answer.num_tokens)
                    if stages.first_chunk_at_s is None:
                        self._record_first_chunk(placing, stages)
                        if is_resumed:
                            self._count_resumption()
                    if chunk.payload:  # else only tokens have arrived
                        yield chunk.payload
                    if self._channel_call.is_leaving and services.moves.begin(context, lease.worker):
                        return
            except ChannelLostError as error:
                if decode_call.channel_call is not None:
                    context.failures.lost_engines += not error.silent
                    self._prompt.on_engine_lost()
                self._raise_unless_complete(error, decode_call, suspects_prefill=False)
            except CallTimeoutError as error:
                services.outliers.record_failure(lease.worker, error)
                self._raise_unless_complete(error, decode_call, suspects_prefill=not decode_call.has_begun)
            except CallFailedError as error:
                if error.status < 500 and not context.answer.sent and not decode_call.has_begun:
                    raise
                if error.status >= 500:  # else the resumed request is at fault, for example too long
                    services.outliers.record_failure(lease.worker, error)
                self._raise_unless_complete(error, decode_call, suspects_prefill=True)
            else:
                report = msgspec.convert(self._channel_call.engine_report, GenerationReport)
                stages.transport_s = report.transport_s
                if not is_resumed:
                    self._count_cached_tokens(lease, report.cached_tokens)
                if not decode_call.has_begun:
                    raise self._decode_failure("the answer was empty", decode_call, suspects_prefill=True)
                services.outliers.record_success(lease.worker)

    def _make_decode_call(self, lease: Lease) -> DecodeCall:
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
        stages.first_chunk_at_s = now_s = time.monotonic()
        if record.first_token_at_s is None:
            record.first_token_at_s = now_s
        if self._context.request.fields.stream:
            record.status = 200
        if self._prompt.prefilled_at_s is not None:
            record.handover_s = now_s - self._prompt.prefilled_at_s
            self._services.stage_latencies.record(
                place=placing.seconds,
                first_token=now_s - stages.started_at_s,
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

    def _raise_unless_complete(
        self, error: Exception, decode_call: DecodeCall, *, suspects_prefill: bool
    ) -> None:
        """Raise DecodeFailedError, unless the client has the complete answer.

        Args:
            suspects_prefill: the prompt's blocks may be at fault, because the worker's replica reported the
                failure itself or sent no token in time.
        """
        if not self._context.answer.complete:
            raise self._decode_failure(error, decode_call, suspects_prefill=suspects_prefill) from error

    def _decode_failure(
        self, reason: Any, decode_call: DecodeCall, *, suspects_prefill: bool
    ) -> DecodeFailedError:
        suspect = self._prompt.prefill_replica if suspects_prefill else ""
        return DecodeFailedError(
            reason, decode_call.worker, has_begun=decode_call.has_begun, suspect_replica=suspect
        )
