"""The results of a run in progress, from which an `Outcome` is made."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np

from eldr_serve.scheduling.shadow import PolicyComparison
from offline.simulation.outcome import Outcome
from offline.simulation.requests import Requests


class Recorder:
    """Results by request, by step and by sample; see `Outcome`.

    Attributes:
        arrival_s, prefilled_s, placed_s, first_s, last_s: float64[N].
        worker: int64[N], decode worker; -1: not placed.
        cached_tokens: int64[N], cached prompt tokens.
        preempted: number of preemptions.
        held_back: number of requests that waited for a prefill worker which takes them.
        refused: number of held-back requests that waited too long.
        largest_prefill_kv_tokens: the most KV tokens that a prefill worker has held.
    """

    def __init__(self, requests: Requests) -> None:
        n = len(requests)
        nan = np.full(n, np.nan)
        self._tokens = requests.output_tokens
        self.arrival_s = requests.arrival_s.copy()
        self.prefilled_s, self.placed_s, self.first_s, self.last_s = (nan.copy() for _ in range(4))
        self.worker = np.full(n, -1, np.int64)
        self.cached_tokens = np.zeros(n, np.int64)
        self.preempted = self.held_back = self.refused = 0
        self.largest_prefill_kv_tokens = self._largest_kv_tokens = 0
        self._steps = array("i"), array("i"), array("d"), array("i")
        self._imbalance, self._spread, self._sample_s = array("d"), array("d"), array("d")

    def record_step(self, batch: int, experts: int, seconds: float, worker: int) -> None:
        """Record a decode step."""
        batches, active, durations, workers = self._steps
        batches.append(batch)
        active.append(experts)
        durations.append(seconds)
        workers.append(worker)

    def record_sample(self, now: float, kv_tokens: Sequence[int]) -> None:
        """Record the differences between the workers' KV tokens."""
        self._sample_s.append(now)
        largest = max(kv_tokens)
        self._largest_kv_tokens = max(self._largest_kv_tokens, largest)
        self._imbalance.append(largest * len(kv_tokens) - sum(kv_tokens))
        self._spread.append(largest - min(kv_tokens))

    def make_outcome(self, shadow_comparison: PolicyComparison | None) -> Outcome:
        """Return the results. `shadow_comparison` is the shadow's."""
        batch, experts, seconds, step_worker = self._steps
        return Outcome(
            self.arrival_s,
            self.prefilled_s,
            self.placed_s,
            self.first_s,
            self.last_s,
            self.worker,
            self._tokens,
            self.cached_tokens,
            self.preempted,
            np.array(batch, np.int64),
            np.array(experts, np.int64),
            np.array(seconds),
            np.array(step_worker, np.int64),
            np.array(self._imbalance),
            np.array(self._spread),
            np.array(self._sample_s),
            shadow_comparison,
            held_back=self.held_back,
            refused=self.refused,
            largest_kv_tokens=self._largest_kv_tokens,
            largest_prefill_kv_tokens=self.largest_prefill_kv_tokens,
        )
