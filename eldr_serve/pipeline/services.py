"""Assembly of the objects that answer the requests of one ingress."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Protocol

from eldr_serve.fleet.decode_start import DecodeStartEstimator
from eldr_serve.fleet.outliers import OutlierDetector
from eldr_serve.monitoring.ingress_counters import IngressCounters
from eldr_serve.pipeline.fleets import Fleets
from eldr_serve.pipeline.kv_release import KvRelease
from eldr_serve.pipeline.latency_admission import LatencyAdmission
from eldr_serve.pipeline.latency_predictor import LatencyPredictor
from eldr_serve.pipeline.move_limiter import MoveLimiter
from eldr_serve.pipeline.path_options import PathOptions
from eldr_serve.pipeline.prediction_recorder import PredictionRecorder
from eldr_serve.pipeline.prefill_admission import PrefillAdmission
from eldr_serve.pipeline.prompt import Prompt
from eldr_serve.pipeline.prompt_tokens import PromptTokens
from eldr_serve.pipeline.request_context import RequestContext
from eldr_serve.pipeline.retry_limiter import RetryLimiter
from eldr_serve.pipeline.split_prefill import SplitPrefill
from eldr_serve.pipeline.stage_latencies import StageLatencies
from eldr_serve.pipeline.whole_prefill import WholePrefill
from eldr_serve.router_client.client import RouterClient


class Prefill(Protocol):
    """Prefill on engines of its own (SplitPrefill) or on the decode engines (WholePrefill)."""

    async def tokenise_for_admission(self, context: RequestContext) -> None:
        """Tokenise the prompt for its admission, if no prefill engine will tokenise it."""

    async def prepare(self, context: RequestContext) -> Prompt:
        """Return the prompt, ready for placement."""


@dataclass(frozen=True)
class Services:
    """Objects that all requests of one ingress share.

    Attributes:
        fleets: the prefill and decode replicas.
        router_client: places requests and releases their leases.
        counters: counters of the ingress.
        options: limits and timeouts of the request path.
        prefill_admission: admits prompts to the queues of the replicas that prefill.
        kv_release: releases KV blocks on the prefill engines.
        prefill: computes prompts before their placement, or leaves them to the decode engines.
        retries: limits how many failed requests are tried again at once.
        outliers: ejects decode replicas that fail repeatedly.
        decode_starts: estimates when decode workers start on waiting calls.
        latency_admission: admits requests by predicted latency.
        prediction_recorder: measures the accuracy of these predictions.
        moves: limits how many answers leave their decode replicas at once.
        stage_latencies: durations of the stages before the first token.
    """

    fleets: Fleets
    router_client: RouterClient
    counters: IngressCounters
    options: PathOptions
    prefill_admission: PrefillAdmission
    kv_release: KvRelease
    prefill: Prefill
    retries: RetryLimiter
    outliers: OutlierDetector
    decode_starts: DecodeStartEstimator
    latency_admission: LatencyAdmission
    prediction_recorder: PredictionRecorder
    moves: MoveLimiter
    stage_latencies: StageLatencies


def build_services(
    *,
    fleets: Fleets,
    router_client: RouterClient,
    counters: IngressCounters,
    options: PathOptions,
    tokenizer: PromptTokens | None = None,
) -> Services:
    """Build the services of one ingress.

    Args:
        tokenizer: tokenises prompts that are placed before an engine has tokenised them.
    """
    stage_latencies = StageLatencies()
    kv_release = KvRelease(fleets.prefill)
    outliers = OutlierDetector(fleets.decode, counters)
    admission = PrefillAdmission(fleets.prefill_capable, bound_s=options.prefill_queue_s, counters=counters)
    decode_starts = DecodeStartEstimator(fleets.decode)
    recorder = PredictionRecorder(_now_s)
    predictor = LatencyPredictor(fleets, admission.queues, decode_starts, recorder)
    prefill: Prefill
    if fleets.whole:
        prefill = WholePrefill(outliers, admission, tokenizer)
    else:
        prefill = SplitPrefill(
            fleets=fleets,
            admission=admission,
            options=options,
            counters=counters,
            kv_release=kv_release,
            stage_latencies=stage_latencies,
            router_client=router_client,
            predictor=predictor,
            tokenizer=tokenizer,
        )
    return Services(
        fleets=fleets,
        router_client=router_client,
        counters=counters,
        options=options,
        prefill_admission=admission,
        kv_release=kv_release,
        prefill=prefill,
        retries=RetryLimiter(options),
        outliers=outliers,
        decode_starts=decode_starts,
        latency_admission=LatencyAdmission(
            fleets=fleets,
            router_client=router_client,
            counters=counters,
            prefill_admission=admission,
            predictor=predictor,
            recorder=recorder,
            clock=_now_s,
        ),
        prediction_recorder=recorder,
        moves=MoveLimiter(fleets.decode, decode_starts, options.moves_at_once),
        stage_latencies=stage_latencies,
    )


def _now_s() -> float:
    return time.monotonic()  # the clock of RequestRecord
