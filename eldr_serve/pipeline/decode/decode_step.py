"""Decoding of a request on its leased worker, with the times and failures of the decode call."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator

import msgspec

from eldr_serve.channel import CallFailedError, CallTimeoutError, ChannelLostError
from eldr_serve.engine.calls import GenerationReport
from eldr_serve.fleet.decode_start import DecodeStartEstimator
from eldr_serve.fleet.outliers import OutlierDetector
from eldr_serve.metrics import IngressEvent
from eldr_serve.monitoring.ingress_counters import IngressCounters
from eldr_serve.pipeline.context.failures import DecodeFailedError
from eldr_serve.pipeline.context.request_context import RequestContext
from eldr_serve.pipeline.context.stage import DecodeStages, Stage
from eldr_serve.pipeline.context.stage_latencies import StageLatencies
from eldr_serve.pipeline.decode.leased_decode import LeasedDecode
from eldr_serve.pipeline.decode.move_limiter import MoveLimiter
from eldr_serve.pipeline.fleets import Fleets
from eldr_serve.pipeline.path_options import PathOptions
from eldr_serve.pipeline.prefill.prompt import Prompt
from eldr_serve.router_client.client import RouterClient
from eldr_serve.scheduling.types import Lease


class DecodeStep:
    """Decodes requests on the workers that they have leased.

    Args:
        fleets: the replicas of prefill and of decode engines.
        router_client: receives the progress of answers.
        counters: counters of the ingress.
        options: timeouts of decode calls.
        decode_starts: estimates when workers start on waiting calls.
        outliers: ejects workers that fail repeatedly.
        moves: limits how many answers leave their workers at once.
        stage_latencies: durations of the stages before the first token.
    """

    def __init__(
        self,
        *,
        fleets: Fleets,
        router_client: RouterClient,
        counters: IngressCounters,
        options: PathOptions,
        decode_starts: DecodeStartEstimator,
        outliers: OutlierDetector,
        moves: MoveLimiter,
        stage_latencies: StageLatencies,
    ) -> None:
        self._fleets = fleets
        self._router_client = router_client
        self._counters = counters
        self._options = options
        self._decode_starts = decode_starts
        self._outliers = outliers
        self._moves = moves
        self._stage_latencies = stage_latencies

    def make_decode(self, context: RequestContext, prompt: Prompt, lease: Lease) -> LeasedDecode:
        """Return the decode on the leased worker, whose call `run` sends."""
        return LeasedDecode(
            context,
            prompt,
            lease,
            fleet=self._fleets.decode,
            decode_starts=self._decode_starts,
            router_client=self._router_client,
            options=self._options,
            counts_prompts=self._fleets.decode_engines_prefill,
        )

    async def run(
        self, context: RequestContext, leased_decode: LeasedDecode, placing: Stage
    ) -> AsyncGenerator[bytes, None]:
        """Yield the engine's bytes as they arrive, and time the stages.

        If the answer moves to another engine, the bytes end before it is complete (see MoveLimiter).

        Args:
            placing: the stage of the request's placement.

        Raises:
            DecodeFailedError: the answer is not complete.
            CallFailedError: the engine refuses the request itself.
        """
        worker = leased_decode.worker
        is_resumed = context.answer.num_tokens > 0
        with context.record.decode_stages(worker) as stages, leased_decode:
            try:
                call = leased_decode.send()
                while (chunk := await leased_decode.read()) is not None:
                    context.answer.append(chunk)
                    self._router_client.set_generated_tokens(context.request_id, context.answer.num_tokens)
                    if stages.first_chunk_at_s is None:
                        self._record_first_chunk(context, leased_decode.prompt, placing, stages)
                        if is_resumed:
                            self._count_resumption(context)
                    if chunk.payload:  # else only tokens have arrived
                        yield chunk.payload
                    if call.is_leaving and self._moves.begin(context, worker):
                        return
            except ChannelLostError as error:
                if leased_decode.call is not None:
                    context.failures.lost_engines += not error.silent
                    leased_decode.prompt.on_engine_lost()
                _raise_unless_complete(error, context, leased_decode, suspects_prefill=False)
            except CallTimeoutError as error:
                self._outliers.record_failure(worker, error)
                _raise_unless_complete(
                    error, context, leased_decode, suspects_prefill=not leased_decode.has_begun
                )
            except CallFailedError as error:
                if error.status >= 500:
                    self._outliers.record_failure(worker, error)
                elif not (context.answer.has_started or leased_decode.has_begun):
                    if not is_resumed:
                        raise
                    context.answer.discard()  # the resumed request is at fault, for example too long
                # 503 is a full decode engine, whatever the prefill was.
                suspects_prefill = error.status >= 500 and error.status != 503
                _raise_unless_complete(error, context, leased_decode, suspects_prefill=suspects_prefill)
            else:
                report = msgspec.convert(call.engine_report, GenerationReport)
                stages.transport_s = report.transport_s
                if not is_resumed:
                    self._count_cached_tokens(leased_decode.lease, report.cached_tokens)
                if not context.answer.is_complete:
                    raise _decode_failure("the answer is incomplete", leased_decode, suspects_prefill=True)
                self._outliers.record_success(worker)

    def _record_first_chunk(
        self, context: RequestContext, prompt: Prompt, placing: Stage, stages: DecodeStages
    ) -> None:
        record = context.record
        stages.first_chunk_at_s = now_s = time.monotonic()
        if record.first_token_at_s is None:
            record.first_token_at_s = now_s
        if context.request.fields.stream:
            record.status = 200
        if prompt.prefilled_at_s is not None:
            record.handover_s = now_s - prompt.prefilled_at_s
            self._stage_latencies.record(
                place=placing.seconds,
                first_token=now_s - stages.started_at_s,
                handover=record.handover_s,
            )

    def _count_resumption(self, context: RequestContext) -> None:
        """Count an answer that continues on this engine, and end its move if it has moved."""
        has_moved = self._moves.end(context.request_id)
        self._counters.count(IngressEvent.MOVED if has_moved else IngressEvent.RESUMED)

    def _count_cached_tokens(self, lease: Lease, cached_tokens: float | None) -> None:
        """Count predicted and measured tokens in the prefix cache, if the router has predicted them."""
        if cached_tokens is not None and lease.request.blocks is not None and lease.position >= 0:
            self._counters.count(IngressEvent.PREFIX_TOKENS_PREDICTED, lease.cached_tokens)
            self._counters.count(IngressEvent.PREFIX_TOKENS_MEASURED, int(cached_tokens))


def _raise_unless_complete(
    error: Exception, context: RequestContext, leased_decode: LeasedDecode, *, suspects_prefill: bool
) -> None:
    """Raise DecodeFailedError, unless the client has the complete answer.

    Args:
        suspects_prefill: the prompt's blocks may be at fault, because the worker's replica reported a failure
            of its own or sent no token in time.
    """
    if not context.answer.is_complete:
        raise _decode_failure(error, leased_decode, suspects_prefill=suspects_prefill) from error


def _decode_failure(
    reason: str | Exception, leased_decode: LeasedDecode, *, suspects_prefill: bool
) -> DecodeFailedError:
    suspect = leased_decode.prompt.prefill_replica if suspects_prefill else ""
    return DecodeFailedError(
        reason, leased_decode.worker, has_begun=leased_decode.has_begun, suspect_replica=suspect
    )
