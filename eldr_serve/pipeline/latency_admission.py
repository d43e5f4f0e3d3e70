"""Admission by predicted latency: a request that cannot meet its objective is refused at once."""

from __future__ import annotations

import asyncio
import math
import time
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from eldr_serve.channel.actors import ACTOR_UNAVAILABLE
from eldr_serve.errors import OverloadedError
from eldr_serve.fleet.decode_start import DecodeStartEstimator
from eldr_serve.monitoring.ingress_counters import IngressCounters, IngressEvent
from eldr_serve.pipeline.fleets import Fleets
from eldr_serve.pipeline.prefill_admission import PrefillAdmission
from eldr_serve.pipeline.request_context import RequestContext
from eldr_serve.queues.prediction import WINDOW_S, Concurrency, LatencyPrediction, PredictionAccuracy
from eldr_serve.queues.retry_times import RetryTimes
from eldr_serve.queues.wait_estimate import WaitEstimator
from eldr_serve.request import needs_whole_engine
from eldr_serve.router_client.client import RouterClient
from eldr_serve.scheduling import DecodeLoads

_ROUTER_TIMEOUT_S = 0.1  # without the router's answer in this time, the TPOT is not predicted
_MAX_CACHED_SHARE = 0.95


class LatencyAdmission:
    """The admission of one ingress's requests with an objective, which measures its own predictions.

    The TTFT is predicted for each worker that prefills. It is the time to compute earlier prompts and the
    uncached tokens of this one, and the waits for a decode worker and for a slot of its engine. The TPOT is
    predicted for each decode worker. It is the time of a step with this request and with an even share of the
    requests that have no worker yet. A request is admitted if prediction and margin (see PredictionAccuracy)
    are within its objective at some worker. A latency that cannot be predicted does not count.
    """

    def __init__(
        self,
        *,
        fleets: Fleets,
        router: RouterClient,
        counters: IngressCounters,
        admission: PrefillAdmission,
        decode_starts: DecodeStartEstimator,
    ) -> None:
        self._fleets = fleets
        self._prefill = fleets.prefilling
        self._router = router
        self._counters = counters
        self._admission, self._queues = admission, admission.queues
        self._decode_starts = decode_starts
        self._ttft, self._tpot = PredictionAccuracy(_now), PredictionAccuracy(_now)
        self._retries = RetryTimes(clock=_now)  # one unit for each request
        self._ends = WaitEstimator(clock=_now)  # of requests that held a decode worker
        self._concurrency = Concurrency(_now)
        self._measured_at_s: float | None = None  # newest measurement, or admission for the sake of one

    def status(self) -> dict[str, dict[str, float]]:
        """Return counts and errors of the predictions, by latency."""
        return {"ttft": self._ttft.status(), "tpot": self._tpot.status()}

    # -- admission ---------------------------------------------------------------------------------

    async def admit(self, context: RequestContext) -> None:
        """Predict the latencies of a request that has an objective.

        Set `context.late_replicas` or `late_workers` to those that would miss it. For a retry or without an
        objective, do nothing else.

        Raises:
            OverloadedError: the request would miss its objective everywhere.
        """
        context.late_replicas = context.late_workers = ()
        if not context.request.objective or context.is_retry:
            return
        loads = await self._decode_loads(context)
        # The caller's next steps do not wait while there is room, so requests that arrive together count
        # each other.
        num_tokens = self._admission.estimate_tokens(context)
        compute_s = self._predict_compute_s(loads, num_tokens)
        ttfts = self._predict_ttfts(context, compute_s)
        batches = self._batches(loads)
        tpots = {name: self._step_s(loads, name, batch, num_tokens) for name, batch in batches.items()}
        load = min(batches.values(), default=float(self._concurrency.running))
        margins = self._ttft.margin_s(load), self._tpot.margin_s(load)
        prediction = context.prediction = LatencyPrediction(
            ttfts, min(tpots.values(), default=None), load, *margins
        )
        ttft_delays = self._ttft_delays(context, prediction, compute_s, num_tokens)
        tpot_delays = self._tpot_delays(context, prediction, loads, tpots, batches, num_tokens)
        if self._fleets.whole:  # one worker must meet both
            delays = {
                name: max(ttft_delays.get(name, 0.0), tpot_delays.get(name, 0.0))
                for name in ttft_delays.keys() | tpot_delays.keys()
            }
            delay_s = min(delays.values(), default=0.0)
            # A request that waits in the decode queue may find other loads when its turn comes.
            if loads is not None and not loads.waiting:
                context.late_workers = _late_names(delays)
        else:
            delay_s = max(min(d.values(), default=0.0) for d in (ttft_delays, tpot_delays))
            context.late_replicas = _late_names(ttft_delays)
        if delay_s:
            self._refuse(context, prediction, delay_s)
        self._retries.claim(context.retry_key)

    async def _decode_loads(self, context: RequestContext) -> DecodeLoads | None:
        """Return the loads of the decode workers from the router; None if it does not answer in time."""
        if self._router.router_unreachable:
            return None
        blocks = None
        if context.prompt_ids is not None:
            blocks = context.blocks(context.prompt_ids, self._fleets.decode.block_tokens)
        try:
            async with asyncio.timeout(_ROUTER_TIMEOUT_S):
                return await self._router.decode_loads(blocks)
        except ACTOR_UNAVAILABLE:
            return None

    def _predict_compute_s(self, loads: DecodeLoads | None, num_tokens: float) -> dict[str, float]:
        """Return how long each worker computes the prompt, s; empty until a rate is measured.

        A rate counts all tokens of prompts, also the share that the mean prompt has in the prefix cache. If
        the router knows how many tokens of this prompt a worker has cached, its uncached tokens are divided
        by the uncached share of the mean prompt.
        """
        queues, names = self._queues, self._prefill.live_names
        if not queues.is_measured(names):
            return {}
        tokens = dict.fromkeys(names, num_tokens)
        if loads is not None:
            mean = 1.0 - min(loads.cached_share, _MAX_CACHED_SHARE)
            cached_tokens = dict(zip(loads.workers.names, loads.workers.cached_tokens.tolist(), strict=True))
            for name in names & cached_tokens.keys():
                tokens[name] = max(num_tokens - cached_tokens[name], 1.0) / mean
        return {name: count / queues.rate([name]) for name, count in tokens.items()}

    def _predict_ttfts(self, context: RequestContext, compute_s: Mapping[str, float]) -> dict[str, float]:
        """Return the predicted TTFT at each worker that prefills, s.

        Args:
            compute_s: time in which the worker computes the prompt, s.
        """
        other_s = time.monotonic() - context.record.start_s + self._router.queue_wait_s
        other_s += self._decode_starts.wait_s()
        other_s += self._queues.unplaced_s([*compute_s])
        return {name: other_s + self._queues.wait_s(name) + seconds for name, seconds in compute_s.items()}

    def _batches(self, loads: DecodeLoads | None) -> dict[str, float]:
        """Return the requests that each decode worker would have with this one; empty if steps have no cost.

        Requests that have no worker yet are shared evenly.
        """
        if loads is None or loads.step.cost is None or not loads.workers.names:
            return {}
        num_prefilling = sum(self._fleets.prefill.in_flight.values())
        # Whole engines' requests in the decode queue are among those whose prompts have no worker.
        num_unplaced = max(self._queues.num_unplaced, num_prefilling + loads.waiting)
        workers = loads.workers
        batches = workers.in_flight + 1 + num_unplaced / len(workers.names)
        return dict(zip(workers.names, batches.tolist(), strict=True))

    def _step_s(self, loads: DecodeLoads | None, worker: str, batch: float, num_tokens: float) -> float:
        """Return the time of a worker's step with so many requests, as long as its own and this one, s."""
        assert loads is not None
        workers, row = loads.workers, loads.workers.rows[worker]
        batch = min(batch, self._decode_starts.slots(worker) or math.inf)
        kv_tokens = (int(workers.kv_tokens[row]) + num_tokens) / (int(workers.in_flight[row]) + 1) * batch
        return loads.step.seconds(batch, kv_tokens)

    # -- delays until the objective could be met ---------------------------------------------------

    def _ttft_delays(
        self,
        context: RequestContext,
        prediction: LatencyPrediction,
        compute_s: Mapping[str, float],
        num_tokens: float,
    ) -> dict[str, float]:
        """Return after how long the objective could be met at each worker, s; inf: not even when idle.

        Waits become shorter by one second a second. Earlier refused requests return before this one.
        """
        objective_s = context.request.objective.ttft_s
        ttfts = prediction.ttft_s
        if objective_s is None or not ttfts:
            return {}
        bound_s = objective_s - prediction.ttft_margin_s
        returning_s = self._retries.tokens * num_tokens / self._queues.rate(ttfts)
        delays = {}
        for name, ttft_s in ttfts.items():
            if ttft_s <= bound_s:
                delays[name] = 0.0
            else:
                delays[name] = math.inf if compute_s[name] > bound_s else ttft_s - bound_s + returning_s
        return delays

    def _tpot_delays(
        self,
        context: RequestContext,
        prediction: LatencyPrediction,
        loads: DecodeLoads | None,
        tpots: Mapping[str, float],
        batches: Mapping[str, float],
        num_tokens: float,
    ) -> dict[str, float]:
        """Return after how long enough requests have ended at each decode worker to meet the objective, s.

        inf: not even a request alone meets it.
        """
        objective_s = context.request.objective.tpot_s
        if objective_s is None or loads is None or not tpots:
            return {}
        bound_s = objective_s - prediction.tpot_margin_s
        total = max(int(loads.workers.in_flight.sum()), 1)
        # Number of this ingress's requests that end while one request of the worker ends.
        own_ends = min(self._concurrency.running / total, 1.0) * len(tpots)
        delays = {}
        for name, tpot_s in tpots.items():
            if tpot_s <= bound_s:
                delays[name] = 0.0
                continue
            sizes = range(1, math.ceil(batches[name]))  # those that meet the objective are the first ones
            num_fitting = bisect_left(
                sizes, True, key=lambda size: self._step_s(loads, name, size, num_tokens) > bound_s
            )
            num_ends = (batches[name] - num_fitting) * own_ends + self._retries.tokens
            delays[name] = max(self._ends.wait_s(num_ends), 1.0) if num_fitting else math.inf
        return delays

    def _refuse(self, context: RequestContext, prediction: LatencyPrediction, delay_s: float) -> None:
        """Raise OverloadedError with the time after which the objective could be met.

        An objective that even an idle engine would miss, by what was measured before, cannot change the
        prediction while all such requests are refused. So one is admitted if none was measured for WINDOW_S.
        """
        now = _now()
        if self._measured_at_s is None:
            self._measured_at_s = now
        if math.isinf(delay_s):
            if now - self._measured_at_s >= WINDOW_S:
                self._measured_at_s = now
                return
            retry_s = self._measured_at_s + WINDOW_S - now
        else:
            retry_s = self._retries.reserve(context.retry_key, 1.0, delay_s, WINDOW_S)
        self._counters.count(IngressEvent.REFUSED_OBJECTIVE)
        raise OverloadedError(self._reason(context, prediction), retry_after_s=max(1, math.ceil(retry_s)))

    def _reason(self, context: RequestContext, prediction: LatencyPrediction) -> str:
        objective = context.request.objective
        parts = []
        if objective.ttft_s is not None and prediction.ttft_s:
            ttft_s = min(prediction.ttft_s.values()) + prediction.ttft_margin_s
            parts.append(f"the first token after {1000 * ttft_s:.0f} ms ({1000 * objective.ttft_s:g} asked)")
        if objective.tpot_s is not None and prediction.tpot_s is not None:
            tpot_s = prediction.tpot_s + prediction.tpot_margin_s
            parts.append(f"a token every {1000 * tpot_s:.1f} ms ({1000 * objective.tpot_s:g} asked)")
        return f"the request would miss its objective: {' and '.join(parts)} are predicted"

    # -- measurement -------------------------------------------------------------------------------

    @contextmanager
    def track(self, context: RequestContext) -> Iterator[None]:
        """Measure a request; record the latencies of an answer that was predicted."""
        mark, start_s = self._concurrency.add(1), _now()
        running = self._concurrency.running
        try:
            yield
            self._record(context, self._concurrency.mean(mark, _now() - start_s) / running)
        finally:
            self._concurrency.add(-1)
            if context.lease is not None:
                self._ends.record_departure(empty=not self._concurrency.running)

    def _record(self, context: RequestContext, growth: float) -> None:
        """Record the latencies of a complete answer of one sequence that stayed at its engine.

        Args:
            growth: mean number of requests that ran meanwhile, times that at the admission.
        """
        request, prediction, first_s = context.request, context.prediction, context.record.first_token_s
        if prediction is None or first_s is None or context.record.error:
            return
        if context.failures.attempts or context.drained_workers:
            return
        if needs_whole_engine(request.method, request.fields) is not None:
            return
        assert context.lease is not None
        worker = context.record.prefill_replica or context.lease.worker
        ttft_s, objective = prediction.ttft_s.get(worker), request.objective
        self._measured_at_s = _now()
        if ttft_s is not None and objective.ttft_s is not None:
            self._ttft.record(ttft_s, first_s - context.record.start_s, objective.ttft_s, prediction.load)
        more_tokens = context.answer.num_tokens - 1
        if prediction.tpot_s is not None and objective.tpot_s is not None and more_tokens > 0:
            tpot_s = (time.monotonic() - first_s) / more_tokens
            self._tpot.record(prediction.tpot_s, tpot_s, objective.tpot_s, growth * prediction.load)


def _late_names(delays: Mapping[str, float]) -> tuple[str, ...]:
    return tuple(name for name, delay_s in delays.items() if delay_s)


def _now() -> float:
    return asyncio.get_running_loop().time()
