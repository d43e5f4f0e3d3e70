"""Prefill by the decode engines themselves, in a deployment without prefill engines."""

from __future__ import annotations

from eldr_serve.fleet.outliers import OutlierDetector
from eldr_serve.pipeline.admission.latency_admission import AdmissionResult
from eldr_serve.pipeline.admission.prefill_admission import PrefillAdmission
from eldr_serve.pipeline.context.request_context import RequestContext
from eldr_serve.pipeline.prefill.prompt import Prompt, TicketedPrompt
from eldr_serve.request import why_not_split


class WholePrefill:
    """Prefill on the engines that also decode: the admission of prompts to their queues.

    Args:
        outliers: excludes workers that fail repeatedly.
    """

    def __init__(self, outliers: OutlierDetector, admission: PrefillAdmission) -> None:
        self._outliers = outliers
        self._admission = admission

    async def prepare(self, context: RequestContext, admission_result: AdmissionResult) -> Prompt:
        """Return the prompt with a ticket for the queue of an engine that placement will choose.

        The prompt of an unstreamed answer to a request that cannot be split is neither counted in the queue
        nor refused for it, because such an answer does not show when its prompt has been computed.

        Raises:
            OverloadedError: no decode engine has room.
        """
        if context.tokenised_ids is not None:
            self._admission.learn_size(context, len(context.tokenised_ids))
        fields = context.request.fields
        num_tokens, workers_to_avoid = 0.0, admission_result.late_workers
        if fields.stream or why_not_split(context.request.method, fields) is None:
            num_tokens = self._admission.estimate_tokens(context)
            if not context.has_earlier_attempt:
                workers_to_avoid = await self._admit(context, num_tokens, admission_result)
        return TicketedPrompt(
            context, num_tokens, self._admission.queues, self._admission.finish, workers_to_avoid
        )

    async def _admit(
        self, context: RequestContext, num_tokens: float, admission_result: AdmissionResult
    ) -> tuple[str, ...]:
        """Admit the prompt; return workers to avoid: those without room, and late ones if others have room.

        Raises:
            OverloadedError: no decode engine has room.
        """
        with_room = await self._admission.admit(context, num_tokens, lambda: self._outliers.usable_workers)
        chosen = admission_result.timely_workers(with_room)
        return tuple(worker for worker in self._outliers.usable_workers if worker not in chosen)
