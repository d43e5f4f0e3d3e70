"""The interface of the prefill of a request."""

from __future__ import annotations

from typing import Protocol

from eldr_serve.pipeline.admission.latency_admission import AdmissionResult
from eldr_serve.pipeline.context.request_context import RequestContext
from eldr_serve.pipeline.prefill.prompt import Prompt


class PrefillStep(Protocol):
    """Prefill on engines of its own (SplitPrefill) or on the decode engines (WholePrefill)."""

    async def prepare(self, context: RequestContext, admission_result: AdmissionResult) -> Prompt:
        """Return the prompt, ready for placement."""
