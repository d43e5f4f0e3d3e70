"""Predicted latencies of a request at each worker, and the delays until its objective could be met there."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass

from eldr_serve.fleet.decode_start import DecodeStartEstimator
from eldr_serve.pipeline.admission.prediction_recorder import PredictionRecorder
from eldr_serve.pipeline.fleets import Fleets
from eldr_serve.queues.prefill_queue import PrefillQueues
from eldr_serve.scheduling.decode_loads import DecodeLoads

_MAX_CACHED_SHARE = 0.95


@dataclass(frozen=True)
class WorkerLatencies:
    """Predicted latencies of one request by worker; a mapping is empty if its values cannot be predicted.

    Attributes:
        num_tokens: estimated number of the prompt's tokens.
        loads: loads of the decode workers; None if unknown.
        compute_s: time in which each worker that prefills computes the prompt, s.
        ttft_s: time to the first token with each of these workers, s.
        batches: requests that each decode worker would have with this one.
        tpot_s: time between tokens at each decode worker, s.
    """

    num_tokens: float
    loads: DecodeLoads | None
    compute_s: dict[str, float]
    ttft_s: dict[str, float]
    batches: dict[str, float]
    tpot_s: dict[str, float]


class LatencyPredictor:
    """Predicts the latencies of one ingress's requests.

    - The TTFT is predicted for each worker that prefills, as the time to compute earlier prompts and the
      uncached tokens of this one, plus the waits for a decode worker and for a slot of its engine.
    - The TPOT is predicted for each decode worker, as the time of a step with this request and with an even
      share of the requests that have no worker yet.
    """

    def __init__(
        self,
        fleets: Fleets,
        queues: PrefillQueues,
        decode_starts: DecodeStartEstimator,
        recorder: PredictionRecorder,
    ) -> None:
        self._fleets = fleets
        self._queues = queues
        self._decode_starts = decode_starts
        self._recorder = recorder

    # -- latencies ---------------------------------------------------------------------------------

    def predict(self, num_tokens: float, loads: DecodeLoads | None, other_s: float) -> WorkerLatencies:
        """Predict the latencies of a request.

        Args:
            num_tokens: estimated number of the prompt's tokens.
            loads: loads of the decode workers; None if unknown.
            other_s: time since the request's arrival and its wait for the router, part of every TTFT, s.
        """
        compute_s = self._predict_compute_s(loads, num_tokens)
        other_s += self._decode_starts.estimate_wait_s()
        other_s += self._queues.unplaced_s([*compute_s])
        ttft_s = {
            name: other_s + self._queues.estimate_wait_s(name) + seconds
            for name, seconds in compute_s.items()
        }
        batches = self._predict_batches(loads)
        tpot_s = {
            name: self._predict_step_s(loads, name, batch, num_tokens) for name, batch in batches.items()
        }
        return WorkerLatencies(num_tokens, loads, compute_s, ttft_s, batches, tpot_s)

    def _predict_compute_s(self, loads: DecodeLoads | None, num_tokens: float) -> dict[str, float]:
        """Return the time that each worker needs for the prompt, s; empty until a rate is measured.

        If the router knows how many tokens of this prompt a worker has cached, the uncached tokens are
        divided by the mean uncached share of prompts. The reason is that a rate counts all tokens of prompts,
        including cached tokens.
        """
        queues, names = self._queues, self._fleets.prefill_capable.live_workers
        if not queues.is_measured(names):
            return {}
        tokens = dict.fromkeys(names, num_tokens)
        if loads is not None:
            mean = 1.0 - min(loads.cached_share, _MAX_CACHED_SHARE)
            cached_tokens = dict(zip(loads.workers.names, loads.workers.cached_tokens.tolist(), strict=True))
            for name in names & cached_tokens.keys():
                tokens[name] = max(num_tokens - cached_tokens[name], 1.0) / mean
        return {name: count / queues.rate([name]) for name, count in tokens.items()}

    def predict_local_costs(self, latencies: WorkerLatencies, queues: PrefillQueues) -> dict[str, float]:
        """Return the cost of a prompt that a decode worker computes beside prefill engines, s, by worker.

        The cost is the time to the first token, plus the delay of each of the worker's running requests. The
        result is empty until steps of decode engines that compute prompts are measured.

        Args:
            queues: prompts that the decode workers have yet to compute.
        """
        loads = latencies.loads
        if loads is None or not loads.step.local_prompt_token_s:
            return {}
        per_token_s, wait_s = loads.step.local_prompt_token_s, self._decode_starts.estimate_wait_s()
        costs_s = {}
        for name, step_s in latencies.tpot_s.items():
            row = loads.workers.rows[name]
            uncached_tokens = max(latencies.num_tokens - int(loads.workers.cached_tokens[row]), 1.0)
            num_delayed = int(loads.workers.in_flight[row]) + 1
            tokens = num_delayed * uncached_tokens + queues.tokens_before(name)
            costs_s[name] = wait_s + step_s + tokens * per_token_s
        return costs_s

    def _predict_batches(self, loads: DecodeLoads | None) -> dict[str, float]:
        """Return the requests that each decode worker would have with this one; empty without a step cost.

        Requests that have no worker yet are divided evenly among the workers.
        """
        if loads is None or loads.step.cost is None or not loads.workers.names:
            return {}
        num_prefilling = sum(self._fleets.prefill.open_calls.values())
        # Whole replicas' requests in the decode queue are among those whose prompts have no worker.
        num_unplaced = max(self._queues.num_unplaced, num_prefilling + loads.waiting)
        workers = loads.workers
        batches = workers.in_flight + 1 + num_unplaced / len(workers.names)
        return dict(zip(workers.names, batches.tolist(), strict=True))

    def _predict_step_s(
        self, loads: DecodeLoads | None, worker: str, batch: float, num_tokens: float
    ) -> float:
        """Return a worker's step time for a batch of this size, s; the mean KV length counts this request."""
        assert loads is not None
        workers, row = loads.workers, loads.workers.rows[worker]
        batch = min(batch, self._decode_starts.num_slots(worker) or math.inf)
        kv_tokens = (int(workers.kv_tokens[row]) + num_tokens) / (int(workers.in_flight[row]) + 1) * batch
        return loads.step.seconds(batch, kv_tokens)

    # -- delays until the objective could be met ---------------------------------------------------

    def predict_ttft_delays(
        self, latencies: WorkerLatencies, bound_s: float, num_returning: float
    ) -> dict[str, float]:
        """Return the delay after which the TTFT at each worker meets a bound, s; inf if it never does.

        The wait at a worker decreases by one second per second.

        Args:
            num_returning: number of refused requests that return before this one.
        """
        if not latencies.ttft_s:
            return {}
        returning_s = num_returning * latencies.num_tokens / self._queues.rate(latencies.ttft_s)
        delays = {}
        for name, ttft_s in latencies.ttft_s.items():
            if ttft_s <= bound_s:
                delays[name] = 0.0
            elif latencies.compute_s[name] > bound_s:
                delays[name] = math.inf
            else:
                delays[name] = ttft_s - bound_s + returning_s
        return delays

    def predict_tpot_delays(
        self, latencies: WorkerLatencies, bound_s: float, num_returning: float
    ) -> dict[str, float]:
        """Return the delay after which the TPOT at each decode worker meets a bound, s.

        After the delay, enough of the worker's requests have ended for a step to be short enough. The delay
        is inf if even a request that runs alone exceeds the bound.

        Args:
            num_returning: number of refused requests that return before this one.
        """
        loads, batches = latencies.loads, latencies.batches
        if loads is None or not latencies.tpot_s:
            return {}
        total = max(int(loads.workers.in_flight.sum()), 1)
        # Number of this ingress's requests that end while one request of the worker ends.
        own_ends = min(self._recorder.num_running / total, 1.0) * len(latencies.tpot_s)
        delays = {}
        for name, tpot_s in latencies.tpot_s.items():
            if tpot_s <= bound_s:
                delays[name] = 0.0
                continue
            num_fitting = self._num_fitting(latencies, name, bound_s)
            num_ends = (batches[name] - num_fitting) * own_ends + num_returning
            ends_s = self._recorder.estimate_ends_s(num_ends)
            delays[name] = max(ends_s, 1.0) if num_fitting else math.inf
        return delays

    def _num_fitting(self, latencies: WorkerLatencies, worker: str, bound_s: float) -> int:
        """Return how many requests a decode worker can have while its step time is within the bound."""
        sizes = range(1, math.ceil(latencies.batches[worker]))

        def is_too_slow(size: int) -> bool:
            return self._predict_step_s(latencies.loads, worker, size, latencies.num_tokens) > bound_s

        return bisect_left(sizes, True, key=is_too_slow)  # smaller batches are faster


def late_names(delays: Mapping[str, float]) -> tuple[str, ...]:
    """Return the workers at which the objective could be met only after a delay."""
    return tuple(name for name, delay_s in delays.items() if delay_s)
