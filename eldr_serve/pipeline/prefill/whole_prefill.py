"""Prefill by the decode engines themselves, in a deployment without prefill engines."""

from __future__ import annotations

from eldr_serve.fleet.outliers import OutlierDetector
from eldr_serve.pipeline.admission.latency_admission import AdmissionResult
from eldr_serve.pipeline.admission.prefill_admission import PrefillAdmission
from eldr_serve.pipeline.context.request_context import RequestContext
from eldr_serve.pipeline.prefill.prompt import Prompt, TicketedPrompt
from eldr_serve.pipeline.prefill.prompt_tokenizer import PromptTokenizer
from eldr_serve.request import needs_whole_replica


class WholePrefill:
    """Prefill on the engines that also decode: the admission of prompts to their queues.

    Args:
        outliers: excludes workers that fail repeatedly.
        tokenizer: tokenises prompts before placement.
    """

    def __init__(
        self, outliers: OutlierDetector, admission: PrefillAdmission, tokenizer: PromptTokenizer | None
    ) -> None:
        self._outliers = outliers
        self._admission, self._queues = admission, admission.queues
        self._tokenizer = tokenizer

    async def tokenise_for_admission(self, context: RequestContext) -> None:
        """Tokenise the prompt, to find its cached tokens."""
        if self._tokenizer is not None:
            await self._tokenizer.add_ids_to(context)

    async def prepare(self, context: RequestContext, admission: AdmissionResult) -> Prompt:
        """Return the prompt with a ticket for the queue of an engine that placement will choose.

        A prompt whose answer arrives only as a whole is neither counted in the queue nor refused because of
        it, because such an answer does not show when its prompt has been computed.

        Raises:
            OverloadedError: no decode engine has room.
        """
        if context.tokenised_ids is not None:
            self._admission.learn_size(context, len(context.tokenised_ids))
        fields = context.request.fields
        num_tokens, workers_to_avoid = 0.0, admission.late_workers
        if fields.stream or needs_whole_replica(context.request.method, fields) is None:
            num_tokens = self._admission.estimate_tokens(context)
            if not context.is_retry:
                workers_to_avoid = await self._admit(context, num_tokens, admission.late_workers)
        ticket = self._queues.enter(None, num_tokens, context.retry_key)
        return TicketedPrompt(
            ticket,
            self._admission,
            context.prompt_ids,
            num_generated=context.answer.num_ids,
            workers_to_avoid=workers_to_avoid,
        )

    async def _admit(
        self, context: RequestContext, num_tokens: float, late_workers: tuple[str, ...]
    ) -> tuple[str, ...]:
        """Admit the prompt; return workers to avoid: those without room, and late ones if others have room.

        Raises:
            OverloadedError: no decode engine has room.
        """
        with_room = await self._admission.admit(context, num_tokens, lambda: self._outliers.usable_names)
        chosen = [name for name in with_room if name not in late_workers] or with_room
        return tuple(name for name in self._outliers.usable_names if name not in chosen)
