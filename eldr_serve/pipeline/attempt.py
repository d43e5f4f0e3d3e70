"""The steps that answer a request, in their order: prefill, place, decode, release."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

from eldr_serve.pipeline.admission.latency_admission import LatencyAdmission
from eldr_serve.pipeline.admission.retry_limiter import RetryLimiter
from eldr_serve.pipeline.context.request_context import RequestContext
from eldr_serve.pipeline.decode.decode_step import DecodeStep
from eldr_serve.pipeline.decode.leased_decode import LeasedDecode
from eldr_serve.pipeline.decode.placement_step import PlacementStep
from eldr_serve.pipeline.prefill.prompt import PrefillStep, Prompt, UncomputedPrompt
from eldr_serve.pipeline.prefill.prompt_tokenizer import PromptTokenizer


class AttemptSteps:
    """The steps of an attempt to answer a request.

    An attempt owns the prompt's resources, the decode call and the lease, and ends each of them.

    Args:
        retries: limits how many failed requests are tried again at once.
        tokenizer: tokenises prompts for their admission; None if prefill engines tokenise them.
        latency_admission: admits requests by predicted latency.
        prefill, placement, decode: the steps.
    """

    def __init__(
        self,
        *,
        retries: RetryLimiter,
        tokenizer: PromptTokenizer | None,
        latency_admission: LatencyAdmission,
        prefill: PrefillStep,
        placement: PlacementStep,
        decode: DecodeStep,
    ) -> None:
        self._retries = retries
        self._tokenizer = tokenizer
        self._latency_admission = latency_admission
        self._prefill = prefill
        self._placement = placement
        self._decode = decode

    async def run(self, context: RequestContext) -> AsyncGenerator[bytes, None]:
        """Yield the decode engine's answer: the bytes of a stream as they arrive, or of one response.

        If the answer moves to another engine, the bytes end before it is complete (see MoveLimiter).

        Raises:
            OverloadedError: no engine can take the request.
            PrefillFailedError: the prefill engine is at fault.
            DecodeFailedError: the answer is not complete.
            CallFailedError: an engine refuses the request itself.
        """
        prompt: Prompt = UncomputedPrompt()
        leased_decode: LeasedDecode | None = None
        try:
            async with self._retries.permit(context):
                await self._placement.wait_for_decode_replica()
                self._placement.refuse_if_slots_are_late(context)
                if self._tokenizer is not None:
                    await self._tokenizer.add_ids_to(context)
                admission_result = await self._latency_admission.admit(context)
                context.record.prediction = admission_result.prediction
                prompt = await self._prefill.prepare(context, admission_result)
                if prompt.prefilled_ids is not None:
                    context.prefilled_ids = prompt.prefilled_ids
                with context.record.stage("place") as placing:
                    context.lease = lease = await self._placement.place(context, prompt)
            leased_decode = self._decode.make_decode(context, prompt, lease)
            async with aclosing(self._decode.run(context, leased_decode, placing)) as payloads:
                async for payload in payloads:
                    yield payload
        finally:
            self._placement.release(context)
            reader = None if leased_decode is None else leased_decode.call
            prompt.close(reader=reader)
