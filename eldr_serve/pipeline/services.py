"""Services that all requests of one ingress share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from eldr_serve.fleet.decode_start import DecodeStartEstimator
from eldr_serve.fleet.outliers import OutlierDetector
from eldr_serve.monitoring.ingress_counters import IngressCounters
from eldr_serve.pipeline.fleets import Fleets
from eldr_serve.pipeline.latency_admission import LatencyAdmission
from eldr_serve.pipeline.move_limiter import MoveLimiter
from eldr_serve.pipeline.path_options import PathOptions
from eldr_serve.pipeline.prepared_prompt import PreparedPrompt
from eldr_serve.pipeline.request_context import RequestContext
from eldr_serve.pipeline.retry_limiter import RetryLimiter
from eldr_serve.pipeline.stage_latencies import StageLatencies
from eldr_serve.router_client.client import RouterClient


class Prefill(Protocol):
    """Prefill on engines of its own (SplitPrefill) or on the decode engines (WholePrefill)."""

    async def tokenise(self, context: RequestContext) -> None:
        """Tokenise the prompt for its admission, if no prefill engine will tokenise it."""

    async def prepare(self, context: RequestContext) -> PreparedPrompt:
        """Return the prompt, ready for placement."""


@dataclass(frozen=True)
class Services:
    """Objects that all requests of one ingress share.

    Attributes:
        counters: counters of the ingress.
        retries: limits how many failed requests are tried again at once.
        outliers: ejects decode replicas that fail repeatedly.
        decode_starts: estimates when decode workers start on waiting calls.
        latency_admission: admits requests by predicted latency.
        moves: limits how many answers leave their decode replicas at once.
    """

    fleets: Fleets
    router: RouterClient
    counters: IngressCounters
    options: PathOptions
    prefill: Prefill
    retries: RetryLimiter
    outliers: OutlierDetector
    decode_starts: DecodeStartEstimator
    latency_admission: LatencyAdmission
    moves: MoveLimiter
    stage_latencies: StageLatencies
