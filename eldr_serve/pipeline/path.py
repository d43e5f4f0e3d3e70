"""The path of one request: attempts until one of them has answered it.

If an answer's engine fails or is drained, the answer continues on another engine, which recomputes the prompt
and the tokens generated so far (see engine/vllm/requests/continuation.py for the engine's part).
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

from eldr_serve.channel import CallFailedError
from eldr_serve.engine.calls import error_event
from eldr_serve.engine.protocol import EngineRequest
from eldr_serve.errors import EnginesLostError, OverloadedError, RequestRefusedError, one_line_message
from eldr_serve.metrics import IngressEvent
from eldr_serve.pipeline.context.failures import DecodeFailedError, Failures, PrefillFailedError
from eldr_serve.pipeline.context.request_context import RequestContext
from eldr_serve.pipeline.decode.forward import forward
from eldr_serve.pipeline.services import Services


class RequestPath:
    """The path of one ingress's requests through the prefill and decode deployments."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def generate(self, context: RequestContext) -> AsyncGenerator[bytes, None]:
        """Yield the decode engine's answer: the bytes of a stream as they arrive, or of one response.

        Raises:
            OverloadedError: no engine could take the request; nothing was generated.
            EnginesLostError: too many engines were lost while they worked on the request.
            CallFailedError: an engine refuses the request itself; its status is below 500.
        """
        failures = context.failures
        answer = context.answer
        moves = self._services.moves
        with context, moves.track(context.request_id), self._services.prediction_recorder.track(context):
            while True:
                try:
                    async with aclosing(self._services.attempt_steps.run(context)) as payloads:
                        async for payload in payloads:
                            yield payload
                    if not moves.is_moving(context.request_id):
                        return
                except (PrefillFailedError, DecodeFailedError) as failure:
                    if not self._handle_failure(context, failure):
                        break
                except (RequestRefusedError, CallFailedError) as error:
                    if not answer.has_started:
                        raise
                    why = one_line_message(error)
                    failures.messages.append(f"the answer could not continue on another engine: {why}")
                    break
            if not answer.has_started:
                raise self._refusal(failures)
            self._services.counters.count(IngressEvent.STREAMS_LOST)
            context.record.error = "engine_lost"
            reason = f"this answer is incomplete: {failures.messages[-1]}; send the request again"
            yield error_event("engine_lost", reason, context.request.method)

    async def forward(self, request: EngineRequest) -> bytes:
        """Return a decode engine's answer to a request that generates nothing; see forward.forward."""
        services = self._services
        timeout_s = services.options.first_token_timeout_s
        return await forward(services.fleets.decode, services.outliers, request, timeout_s)

    def _handle_failure(
        self, context: RequestContext, failure: PrefillFailedError | DecodeFailedError
    ) -> bool:
        """Record the failure of an attempt; return whether another attempt may follow."""
        failures = context.failures
        answer = context.answer
        options = self._services.options
        lost_too_many = failures.lost_engines >= options.max_lost_engines
        if isinstance(failure, PrefillFailedError):
            failures.add_prefill(failure)
            attempts_left = options.prefill_attempts - failures.prefills
            if attempts_left == 0 and not self._services.fleets.prefill.live_workers:
                attempts_left = 1  # without a live prefill replica, a decode engine may prefill one more
            if lost_too_many or attempts_left <= 0:
                return False
            self._services.counters.count(IngressEvent.PREFILL_RETRIES)
            return True
        failures.add_decode(failure, sent=answer.has_started)
        if lost_too_many or (answer.has_started and (failures.midstream > 1 or not answer.can_continue)):
            return False
        if not answer.can_continue:
            answer.discard()
            self._services.moves.end(context.request_id)  # the answer begins again, so it no longer moves
        return len(failures.decode_workers) - failures.midstream < options.decode_attempts

    def _refusal(self, failures: Failures) -> RequestRefusedError:
        """Return the error of a request that no engine has answered."""
        if failures.lost_engines >= self._services.options.max_lost_engines:
            self._services.counters.count(IngressEvent.REFUSED_LOST_ENGINES)
            return EnginesLostError(
                f"{failures.lost_engines} engines were lost while they worked on this request; the request "
                "itself may be the cause, so it is not tried again"
            )
        decodes = len(failures.decode_workers)
        return OverloadedError(
            f"{failures.prefills} prefill and {decodes} decode attempts of this request failed; the last "
            f"failure: {failures.messages[-1]}"
        )
