"""Prefill by the decode engine beside prefill engines, for short prompts that are computed sooner there."""

from __future__ import annotations

import math
from dataclasses import replace

from eldr_serve.metrics import IngressEvent
from eldr_serve.monitoring.ingress_counters import IngressCounters
from eldr_serve.pipeline.fleets import Fleets
from eldr_serve.pipeline.latency_predictor import LatencyPredictor
from eldr_serve.pipeline.prefill_admission import PrefillAdmission
from eldr_serve.pipeline.prompt import TicketedPrompt
from eldr_serve.pipeline.prompt_tokenizer import PromptTokenizer
from eldr_serve.pipeline.request_context import RequestContext
from eldr_serve.pipeline.request_decode_loads import request_decode_loads
from eldr_serve.pipeline.stage_latencies import StageLatencies
from eldr_serve.router_client.client import RouterClient

_MARGIN = 0.2  # a prompt is prefilled locally if that is sooner even if it costs this share more


class LocalPrefill:
    """Chooses whether a prefill engine or the decode engine computes a prompt.

    The decode engine computes a prompt of at most `path.local_prefill_tokens` tokens if its predicted cost
    there and a margin are less than the predicted time by a prefill engine. Without all of the measurements
    that both predictions need, a prefill engine computes it.

    Args:
        fleets: the replicas of prefill and of decode engines.
        router_client: knows the loads of the decode workers.
        counters: counters of the ingress.
        max_tokens: longest prompt that a decode engine computes, in tokens; 0 if it computes no prompts.
        admission: estimates the tokens of prompts.
        predictor: predicts both times.
        stage_latencies: the durations of the stages of earlier requests that were prefilled elsewhere.
        tokenizer: tokenises prompts, to find their cached tokens.
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
        # The prompts that decode engines have yet to compute.
        self._local = PrefillAdmission(fleets.decode, bound_s=math.inf, counters=counters)

    async def choose(self, context: RequestContext) -> TicketedPrompt | None:
        """Return the prompt if its decode engine should compute it; None if a prefill engine should.

        A retry keeps the choice of the first attempt, but an answer that has grown beyond the bound goes to a
        prefill engine.
        """
        if not self._is_short(context):
            return None
        if self._tokenizer is not None:
            await self._tokenizer.add_to(context)
        if not context.is_retry:
            await self._choose_first(context)
        if not context.prefills_locally or not self._is_short(context):
            return None
        num_tokens = self._admission.estimate_tokens(context)
        ticket = self._local.queues.enter(None, num_tokens, context.retry_key)
        return TicketedPrompt(ticket, self._local, context.prompt_ids, context.answer.num_ids)

    def _is_short(self, context: RequestContext) -> bool:
        return bool(self._max_tokens) and self._admission.estimate_tokens(context) <= self._max_tokens

    async def _choose_first(self, context: RequestContext) -> None:
        """Choose for a first attempt: set `prefills_locally`, and the workers at which that is not sooner."""
        loads = await request_decode_loads(self._router_client, context, self._fleets.decode.block_tokens)
        handover_s = self._stage_latencies.median_s("first_token")
        num_tokens = self._admission.estimate_tokens(context)
        # A request that waits in the decode queue would find other loads when its turn comes.
        if loads is None or loads.waiting or handover_s is None or num_tokens > self._max_tokens:
            return
        latencies = self._predictor.predict(num_tokens, loads, 0.0)
        self._local.discard_dead_queues()
        costs_s = self._predictor.predict_local_costs(latencies, self._local.queues)
        if not latencies.ttft_s:
            return
        split_s = min(latencies.ttft_s.values()) + handover_s
        late_workers = tuple(name for name, cost_s in costs_s.items() if cost_s * (1 + _MARGIN) >= split_s)
        if len(late_workers) < len(costs_s):
            context.prefills_locally = True
            context.admission = replace(context.admission, late_workers=late_workers)
            self._counters.count(IngressEvent.PREFILLED_LOCALLY)
