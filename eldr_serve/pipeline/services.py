"""The objects that answer the requests of one ingress, and their assembly."""

from __future__ import annotations

import time

from eldr_serve.fleet.decode_start import DecodeStartEstimator
from eldr_serve.fleet.outliers import OutlierDetector
from eldr_serve.monitoring.ingress_counters import IngressCounters
from eldr_serve.pipeline.admission.latency_admission import LatencyAdmission
from eldr_serve.pipeline.admission.latency_predictor import LatencyPredictor
from eldr_serve.pipeline.admission.prediction_recorder import PredictionRecorder
from eldr_serve.pipeline.admission.prefill_admission import PrefillAdmission
from eldr_serve.pipeline.admission.retry_limiter import RetryLimiter
from eldr_serve.pipeline.attempt import AttemptSteps
from eldr_serve.pipeline.context.stage_latencies import StageLatencies
from eldr_serve.pipeline.decode.decode_step import DecodeStep
from eldr_serve.pipeline.decode.move_limiter import MoveLimiter
from eldr_serve.pipeline.decode.placement_step import PlacementStep
from eldr_serve.pipeline.fleets import Fleets
from eldr_serve.pipeline.path_options import PathOptions
from eldr_serve.pipeline.prefill.kv_release import KvRelease
from eldr_serve.pipeline.prefill.local_prefill import LocalPrefill
from eldr_serve.pipeline.prefill.prompt import PrefillStep
from eldr_serve.pipeline.prefill.prompt_tokenizer import PromptTokenizer
from eldr_serve.pipeline.prefill.split_prefill import SplitPrefill
from eldr_serve.pipeline.prefill.whole_prefill import WholePrefill
from eldr_serve.router_client.client import RouterClient


class Services:
    """Objects that all requests of one ingress share.

    Args:
        tokenizer: tokenises prompts that are placed before an engine has tokenised them.

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
        attempt_steps: the steps of an attempt to answer a request.
        prediction_recorder: measures the accuracy of predicted latencies.
        moves: limits how many answers leave their decode replicas at once.
        stage_latencies: durations of the stages before the first token.
    """

    def __init__(
        self,
        *,
        fleets: Fleets,
        router_client: RouterClient,
        counters: IngressCounters,
        options: PathOptions,
        tokenizer: PromptTokenizer | None = None,
    ) -> None:
        self.fleets = fleets
        self.router_client = router_client
        self.counters = counters
        self.options = options
        self.stage_latencies = StageLatencies()
        self.kv_release = KvRelease(fleets.prefill)
        self.outliers = OutlierDetector(fleets.decode, counters)
        bound_s = options.prefill_queue_s
        self.prefill_admission = PrefillAdmission(fleets.prefill_capable, bound_s=bound_s, counters=counters)
        self.decode_starts = DecodeStartEstimator(fleets.decode)
        self.prediction_recorder = PredictionRecorder(_now_s)
        predictor = LatencyPredictor(
            fleets, self.prefill_admission.queues, self.decode_starts, self.prediction_recorder
        )
        self.prefill: PrefillStep
        if fleets.decode_engines_prefill:
            self.prefill = WholePrefill(self.outliers, self.prefill_admission)
        else:
            self.prefill = self._make_split_prefill(predictor, tokenizer)
        self.retries = RetryLimiter(options)
        latency_admission = LatencyAdmission(
            fleets=fleets,
            router_client=router_client,
            counters=counters,
            prefill_admission=self.prefill_admission,
            predictor=predictor,
            recorder=self.prediction_recorder,
            clock=_now_s,
        )
        placement = PlacementStep(
            fleet=fleets.decode,
            router_client=router_client,
            counters=counters,
            options=options,
            decode_starts=self.decode_starts,
            outliers=self.outliers,
        )
        self.moves = MoveLimiter(self.decode_starts, self.outliers, options.moves_at_once)
        self.attempt_steps = AttemptSteps(
            retries=self.retries,
            tokenizer=tokenizer if fleets.decode_engines_prefill else None,
            latency_admission=latency_admission,
            prefill=self.prefill,
            placement=placement,
            decode=self._make_decode_step(),
        )

    def _make_split_prefill(
        self, predictor: LatencyPredictor, tokenizer: PromptTokenizer | None
    ) -> SplitPrefill:
        local_prefill = LocalPrefill(
            fleets=self.fleets,
            router_client=self.router_client,
            counters=self.counters,
            max_tokens=self.options.local_prefill_tokens,
            admission=self.prefill_admission,
            predictor=predictor,
            stage_latencies=self.stage_latencies,
            tokenizer=tokenizer,
        )
        return SplitPrefill(
            fleets=self.fleets,
            admission=self.prefill_admission,
            options=self.options,
            counters=self.counters,
            kv_release=self.kv_release,
            stage_latencies=self.stage_latencies,
            local_prefill=local_prefill,
            tokenizer=tokenizer,
        )

    def _make_decode_step(self) -> DecodeStep:
        return DecodeStep(
            fleets=self.fleets,
            router_client=self.router_client,
            counters=self.counters,
            options=self.options,
            decode_starts=self.decode_starts,
            outliers=self.outliers,
            moves=self.moves,
            stage_latencies=self.stage_latencies,
        )


def _now_s() -> float:
    return time.monotonic()  # the clock of RequestRecord
