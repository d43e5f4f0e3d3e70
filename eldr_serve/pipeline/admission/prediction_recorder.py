"""The accuracy of one ingress's predicted latencies, measured on its own answers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from eldr_serve.pipeline.admission.prediction_accuracy import ConcurrencyMeter, PredictionAccuracy
from eldr_serve.pipeline.context.request_context import RequestContext
from eldr_serve.queues.wait_estimate import WaitEstimator
from eldr_serve.request import why_not_split


class PredictionRecorder:
    """Records the requests of one ingress: how many run, when they end, and their latencies.

    Args:
        clock: returns the time, s; the clock of RequestRecord.

    Attributes:
        measured_at_s: time of the newest measurement; -inf before the first.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self.measured_at_s = -math.inf
        self._clock = clock
        self._ttft, self._tpot = PredictionAccuracy(clock), PredictionAccuracy(clock)
        self._ends = WaitEstimator(clock=clock)  # ends of requests that held a decode worker
        self._concurrency = ConcurrencyMeter(clock)

    @property
    def num_running(self) -> int:
        """Return the number of running requests."""
        return self._concurrency.running

    def status(self) -> dict[str, dict[str, float]]:
        """Return counts and errors of the predictions, by latency."""
        return {"ttft": self._ttft.status(), "tpot": self._tpot.status()}

    def compute_margins_s(self, load: float) -> tuple[float, float]:
        """Compute the safety margins of a predicted TTFT and TPOT at this load, s; see PredictionAccuracy."""
        return self._ttft.compute_margin_s(load), self._tpot.compute_margin_s(load)

    def estimate_ends_s(self, num_requests: float) -> float:
        """Estimate the time until this many running requests have ended, s; 0 if too few ended so far."""
        return self._ends.estimate_wait_s(num_requests)

    @contextmanager
    def track(self, context: RequestContext) -> Iterator[None]:
        """Measure a request; record the latencies of an answer that was predicted."""
        mark, started_at_s = self._concurrency.start(), self._clock()
        running = self._concurrency.running
        try:
            yield
            self._record(context, self._concurrency.mean(mark, self._clock() - started_at_s) / running)
        finally:
            self._concurrency.end()
            if context.lease is not None:
                self._ends.record_departure(empty=not self._concurrency.running)

    def _record(self, context: RequestContext, growth: float) -> None:
        """Record the latencies of a complete answer of one sequence that stayed at its engine.

        Args:
            growth: mean number of running requests during this one, divided by the number at its admission.
        """
        request, record = context.request, context.record
        prediction, first_token_at_s = record.prediction, record.first_token_at_s
        if prediction is None or first_token_at_s is None or record.error:
            return
        if context.failures.attempts or context.drained_workers:
            return
        if why_not_split(request.method, request.fields) is not None:
            return
        assert context.lease is not None
        worker = record.prefill_replica or context.lease.worker
        ttft_s, objective = prediction.ttft_s.get(worker), request.objective
        self.measured_at_s = self._clock()
        if ttft_s is not None and objective.ttft_s is not None:
            measured_s = first_token_at_s - record.started_at_s
            self._ttft.record(ttft_s, measured_s, objective.ttft_s, prediction.load)
        more_tokens = context.answer.num_tokens - 1
        if prediction.tpot_s is not None and objective.tpot_s is not None and more_tokens > 0:
            tpot_s = (self._clock() - first_token_at_s) / more_tokens
            self._tpot.record(prediction.tpot_s, tpot_s, objective.tpot_s, growth * prediction.load)
