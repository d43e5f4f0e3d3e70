"""Local prefill: a decode engine computes a short prompt if that is sooner than on a prefill engine."""

from __future__ import annotations

import asyncio
import math

from eldr_serve.metrics import IngressEvent
from eldr_serve.monitoring.ingress_counters import IngressCounters
from eldr_serve.pipeline.admission.latency_predictor import LatencyPredictor
from eldr_serve.pipeline.admission.prefill_admission import PrefillAdmission
from eldr_serve.pipeline.admission.request_decode_loads import request_decode_loads
from eldr_serve.pipeline.context.request_context import RequestContext
from eldr_serve.pipeline.context.stage_latencies import StageLatencies
from eldr_serve.pipeline.fleets import Fleets
from eldr_serve.pipeline.prefill.prompt import TicketedPrompt
from eldr_serve.pipeline.prefill.prompt_tokenizer import PromptTokenizer
from eldr_serve.queues.prefill_queue import PrefillQueues
from eldr_serve.router_client.client import RouterClient

_MARGIN = 0.2  # the cost at the decode engine counts as larger by this share


class LocalPrefill:
    """Chooses whether a prefill engine or the decode engine computes a prompt.

    The decode engine computes a prompt of at most `path.local_prefill_tokens` tokens if the predicted cost
    with a margin is less than the predicted time that a prefill engine and the hand-over take. If a
    measurement for these predictions is missing, a prefill engine computes the prompt.

    Args:
        fleets: the replicas of prefill and of decode engines.
        router_client: requests the loads of the decode workers.
        counters: counters of the ingress.
        max_tokens: longest prompt that a decode engine computes, in tokens; 0 if it computes no prompts.
        admission: estimates the tokens of prompts.
        predictor: predicts both times.
        stage_latencies: the durations of the stages of earlier requests that a prefill engine computed.
        tokenizer: tokenises prompts, so that their cached tokens are known.

    Attributes:
        queues: the prompts that decode engines have yet to compute.
    """

    def __init__(
        self,
        *,
        fleets: Fleets,
        router_client: RouterClient,
        counters: IngressCounters,
        max_tokens: int,
        admission: PrefillAdmission,
        predictor: LatencyPredictor,
        stage_latencies: StageLatencies,
        tokenizer: PromptTokenizer | None,
    ) -> None:
        self._fleets = fleets
        self._router_client = router_client
        self._counters = counters
        self._max_tokens = max_tokens
        self._admission = admission
        self._predictor = predictor
        self._stage_latencies = stage_latencies
        self._tokenizer = tokenizer
        self.queues = PrefillQueues(
            math.inf,
            reports=lambda: fleets.decode.directory.reports,
            clock=lambda: asyncio.get_running_loop().time(),
        )

    async def choose(self, context: RequestContext) -> TicketedPrompt | None:
        """Return the prompt if its decode engine should compute it; None if a prefill engine should.

        A retry keeps the choice of the first attempt, unless prompt and answer are now longer than the bound.
        """
        if not self._is_short(context):
            return None
        if self._tokenizer is not None:
            await self._tokenizer.add_ids_to(context)
        workers_to_avoid: tuple[str, ...] = ()
        if not context.has_earlier_attempt:
            workers_to_avoid = await self._choose_first(context)
        if not context.record.prefilled_locally or not self._is_short(context):
            return None
        num_tokens = self._admission.estimate_tokens(context)
        return TicketedPrompt(context, num_tokens, self.queues, self.queues.leave, workers_to_avoid)

    def _is_short(self, context: RequestContext) -> bool:
        return bool(self._max_tokens) and self._admission.estimate_tokens(context) <= self._max_tokens

    async def _choose_first(self, context: RequestContext) -> tuple[str, ...]:
        """Record the choice for a first attempt; return the workers at which local prefill is not sooner."""
        loads = await request_decode_loads(self._router_client, context, self._fleets.decode)
        handover_s = self._stage_latencies.median_s("first_token")
        num_tokens = self._admission.estimate_tokens(context)
        # If requests wait in the decode queue, the loads will have changed when this one gets a worker.
        if loads is None or loads.waiting or handover_s is None or num_tokens > self._max_tokens:
            return ()
        latencies = self._predictor.predict(num_tokens, loads, 0.0)
        self.queues.keep_only(self._fleets.decode.live_workers)
        costs_s = self._predictor.predict_local_costs(latencies, self.queues)
        if not latencies.ttft_s:
            return ()
        split_s = min(latencies.ttft_s.values()) + handover_s
        late_workers = tuple(name for name, cost_s in costs_s.items() if cost_s * (1 + _MARGIN) >= split_s)
        if len(late_workers) < len(costs_s):
            context.record.prefilled_locally = True
            self._counters.count(IngressEvent.PREFILLED_LOCALLY)
        return late_workers
