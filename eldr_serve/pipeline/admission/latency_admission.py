"""Admission by predicted latency: a request that cannot meet its objective is refused at once."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from eldr_serve.errors import OverloadedError
from eldr_serve.metrics import IngressEvent
from eldr_serve.monitoring.ingress_counters import IngressCounters
from eldr_serve.pipeline.admission.latency_predictor import LatencyPredictor, WorkerLatencies, late_names
from eldr_serve.pipeline.admission.prediction_accuracy import WINDOW_S
from eldr_serve.pipeline.admission.prediction_recorder import PredictionRecorder
from eldr_serve.pipeline.admission.prefill_admission import PrefillAdmission
from eldr_serve.pipeline.admission.request_decode_loads import request_decode_loads
from eldr_serve.pipeline.context.latency_prediction import LatencyPrediction
from eldr_serve.pipeline.context.request_context import RequestContext
from eldr_serve.pipeline.fleets import Fleets
from eldr_serve.queues.retry_times import RetryTimes
from eldr_serve.router_client.client import RouterClient

_TRIAL_S = 10.0  # time without a measured answer after which a request is admitted as a trial


@dataclass(frozen=True)
class AdmissionResult:
    """The result of an admission by predicted latency.

    Attributes:
        prediction: predicted latencies; None for a request without an objective, and for a retry.
        late_workers: prefill-capable workers on which the request would miss its objective.
    """

    prediction: LatencyPrediction | None = None
    late_workers: tuple[str, ...] = ()

    def timely_workers(self, workers: list[str]) -> list[str]:
        """Return the workers that are not late, or all workers if all are late."""
        return [name for name in workers if name not in self.late_workers] or workers


class LatencyAdmission:
    """Refuses requests whose predicted latency would miss their objective.

    A request is admitted if its predicted latencies, with their margins, are within its objective at some
    worker. A latency that cannot be predicted is ignored.

    Args:
        clock: returns the time, s; the clock of RequestRecord.
    """

    def __init__(
        self,
        *,
        fleets: Fleets,
        router_client: RouterClient,
        counters: IngressCounters,
        prefill_admission: PrefillAdmission,
        predictor: LatencyPredictor,
        recorder: PredictionRecorder,
        clock: Callable[[], float],
    ) -> None:
        self._fleets = fleets
        self._router_client = router_client
        self._counters = counters
        self._prefill_admission = prefill_admission
        self._predictor = predictor
        self._recorder = recorder
        self._clock = clock
        self._retries = RetryTimes(clock=clock)  # its amounts are numbers of requests
        self._trial_at_s = -math.inf  # time of the newest trial, or of the first refusal

    async def admit(self, context: RequestContext) -> AdmissionResult:
        """Admit a request whose predicted latencies meet its objective, if it has one; admit any retry.

        Raises:
            OverloadedError: the request would miss its objective everywhere.
        """
        if not context.request.objective or context.has_earlier_attempt:
            return AdmissionResult()
        loads = await request_decode_loads(self._router_client, context, self._fleets.decode)
        # While there is room, nothing is awaited from here until the prompt is in a queue, so that the
        # prediction includes the requests that were admitted just before.
        num_tokens = self._prefill_admission.estimate_tokens(context)
        other_s = self._clock() - context.record.started_at_s + self._router_client.queue_wait_s
        latencies = self._predictor.predict(num_tokens, loads, other_s)
        load = min(latencies.batches.values(), default=float(self._recorder.num_running))
        tpot_s = min(latencies.tpot_s.values(), default=None)
        margins_s = self._recorder.compute_margins_s(load)
        prediction = LatencyPrediction(latencies.ttft_s, tpot_s, load, *margins_s)
        ttft_delays, tpot_delays = self._predict_delays(context, latencies, prediction)
        late_workers: tuple[str, ...] = ()
        if self._fleets.decode_engines_prefill:  # one worker must meet both
            delays = {
                name: max(ttft_delays.get(name, 0.0), tpot_delays.get(name, 0.0))
                for name in ttft_delays.keys() | tpot_delays.keys()
            }
            delay_s = min(delays.values(), default=0.0)
            # If requests wait in the decode queue, the loads will have changed when this one gets a worker.
            if loads is not None and not loads.waiting:
                late_workers = late_names(delays)
        else:
            delay_s = max(min(d.values(), default=0.0) for d in (ttft_delays, tpot_delays))
            late_workers = late_names(ttft_delays)
        if delay_s:
            self._refuse_unless_trial(context, prediction, delay_s)
        self._retries.claim(context.resend_key)
        return AdmissionResult(prediction, late_workers)

    def _predict_delays(
        self, context: RequestContext, latencies: WorkerLatencies, prediction: LatencyPrediction
    ) -> tuple[dict[str, float], dict[str, float]]:
        """Return the delays after which the objective's TTFT and TPOT could be met, by worker, s."""
        objective, num_returning = context.request.objective, self._retries.amount
        ttft_delays: dict[str, float] = {}
        tpot_delays: dict[str, float] = {}
        if objective.ttft_s is not None:
            bound_s = objective.ttft_s - prediction.ttft_margin_s
            ttft_delays = self._predictor.predict_ttft_delays(latencies, bound_s, num_returning)
        if objective.tpot_s is not None:
            bound_s = objective.tpot_s - prediction.tpot_margin_s
            tpot_delays = self._predictor.predict_tpot_delays(latencies, bound_s, num_returning)
        return ttft_delays, tpot_delays

    def _refuse_unless_trial(
        self, context: RequestContext, prediction: LatencyPrediction, delay_s: float
    ) -> None:
        """Refuse the request, or return without an error if it is admitted as a trial.

        If even an idle engine is predicted to miss the objective, one request is admitted after _TRIAL_S
        without a measurement, because without measurements the prediction would never change.

        Raises:
            OverloadedError: with the time after which the objective could be met.
        """
        now_s = self._clock()
        measured_at_s = max(self._recorder.measured_at_s, self._trial_at_s)
        if math.isinf(measured_at_s):
            measured_at_s = self._trial_at_s = now_s
        if math.isinf(delay_s):
            if now_s - measured_at_s >= _TRIAL_S:
                self._trial_at_s = now_s
                return
            retry_s = _TRIAL_S - (now_s - measured_at_s)
        else:
            retry_s = self._retries.reserve(context.resend_key, 1.0, delay_s, WINDOW_S)
        self._counters.count(IngressEvent.REFUSED_OBJECTIVE)
        raise OverloadedError(_reason(context, prediction), retry_after_s=max(1, math.ceil(retry_s)))


def _reason(context: RequestContext, prediction: LatencyPrediction) -> str:
    """Return why the request is refused: the predicted latencies and the objective."""
    objective = context.request.objective
    parts = []
    if objective.ttft_s is not None and prediction.ttft_s:
        ttft_ms = 1000 * (min(prediction.ttft_s.values()) + prediction.ttft_margin_s)
        parts.append(f"the first token after {ttft_ms:.0f} ms (objective: {1000 * objective.ttft_s:g} ms)")
    if objective.tpot_s is not None and prediction.tpot_s is not None:
        tpot_ms = 1000 * (prediction.tpot_s + prediction.tpot_margin_s)
        parts.append(f"a token every {tpot_ms:.1f} ms (objective: {1000 * objective.tpot_s:g} ms)")
    return f"the request would miss its objective; the prediction is {' and '.join(parts)}"
