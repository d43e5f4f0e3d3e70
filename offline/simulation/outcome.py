"""The results of simulated requests, and the figures computed from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eldr_serve.arrays import Floats, Ints
from eldr_serve.scheduling.shadow import PolicyComparison
from loadgen.statistics import LatencyObjective


@dataclass(frozen=True)
class Outcome:
    """Results by request, by step and by sample. A request that expired or was refused has NaN or -1.

    Attributes:
        arrival_s, prefilled_s, placed_s, first_s, last_s: float64[N]. The last two are the ends of
            the first and of the last decode step.
        worker: int64[N], decode worker.
        tokens: int64[N], output tokens.
        cached_tokens: int64[N], prompt tokens that were in the prefill worker's cache.
        preempted: number of preemptions by full workers.
        batch, experts, seconds, step_worker: one entry per decode step, experts summed over layers.
        imbalance: one entry per sample, the sum over workers of their KV tokens below the fullest worker's.
        spread: one entry per sample, the fullest worker's KV tokens less the emptiest worker's.
        sample_s: time of each sample.
        shadow_comparison: the shadow's estimate, if there was a shadow.
        held_back: number of requests that waited for a prefill worker which takes them.
        refused: number of held-back requests that waited too long.
        largest_kv_tokens, largest_prefill_kv_tokens: the most KV tokens of a decode worker in a sample, and
            of a prefill worker.
    """

    arrival_s: Floats
    prefilled_s: Floats
    placed_s: Floats
    first_s: Floats
    last_s: Floats
    worker: Ints
    tokens: Ints
    cached_tokens: Ints
    preempted: int
    batch: Ints
    experts: Ints
    seconds: Floats
    step_worker: Ints
    imbalance: Floats
    spread: Floats
    sample_s: Floats
    shadow_comparison: PolicyComparison | None = None
    held_back: int = 0
    refused: int = 0
    largest_kv_tokens: int = 0
    largest_prefill_kv_tokens: int = 0

    @property
    def finished(self) -> NDArray[np.bool_]:
        """Return bool[N], false for requests that expired in the decode queue or were refused."""
        return self.worker >= 0

    @property
    def tpot_s(self) -> Floats:
        """Return the time per output token after the first, of each request, or NaN for a single token."""
        gaps = np.where(self.tokens > 1, self.tokens - 1, np.nan)
        return np.asarray((self.last_s - self.first_s) / gaps)

    @property
    def ttft_s(self) -> Floats:
        """Return the time from arrival to the end of the first decode step, of each request."""
        return self.first_s - self.arrival_s

    def meets(self, objective: LatencyObjective) -> NDArray[np.bool_]:
        """Return bool[N], whether each request met the objective. Expired requests did not."""
        tpot_ms = 1e3 * np.where(self.tokens > 1, self.tpot_s, 0.0)
        good: NDArray[np.bool_] = (1e3 * self.ttft_s <= objective.ttft_ms) & (tpot_ms <= objective.tpot_ms)
        return good

    @property
    def output_tokens_per_s(self) -> float:
        """Return the rate of finished requests' tokens from the first arrival to the last token."""
        return self._compute_rate(self.tokens[self.finished].sum())

    def _compute_rate(self, number: float) -> float:
        """Return the number divided by the seconds from the first arrival to the last token."""
        done = self.finished
        return float(number / (self.last_s[done].max() - self.arrival_s.min())) if done.any() else 0.0

    def select_steady(self, values: Floats) -> Floats:
        """Return the samples taken after a tenth of the arrivals and before the last."""
        if not len(self.arrival_s):
            return values
        start, end = np.quantile(self.arrival_s, 0.1), self.arrival_s[-1]
        inside: Floats = values[(self.sample_s >= start) & (self.sample_s <= end)]
        return inside

    def summarise_domains(self, domains: Sequence[str]) -> list[dict[str, Any]]:
        """Return a table row for each domain, with its requests and TPOT. `domains` has N names."""
        names, tpot = np.array(domains), self.tpot_s
        return [
            {"domain": name, "requests": int((names == name).sum())}
            | _percentiles("tpot", tpot[names == name], (50, 99))
            for name in sorted(set(domains))
        ]

    def summary(self, objective: LatencyObjective | None = None) -> dict[str, Any]:
        """Return a table row, with units in the keys, and with goodput if there is an objective."""
        row = _percentiles("tpot", self.tpot_s, (50, 95, 99)) | _percentiles("ttft", self.ttft_s, (50, 99))
        if objective is not None:
            good = self.meets(objective)
            row |= {"good_pct": 100 * float(good.mean()), "goodput_per_s": self._compute_rate(good.sum())}
        return row | {
            "output_tokens_per_s": self.output_tokens_per_s,
            "imbalance_tokens": _mean(self.select_steady(self.imbalance)),
            "spread_tokens": _mean(self.select_steady(self.spread)),
            "batch_size": _mean(self.batch),
            "active_experts": _mean(self.experts),
            "step_ms": 1e3 * float(self.seconds.mean()) if len(self.seconds) else None,
            "prefix_hit_tokens": int(self.cached_tokens.sum()),
            "expired": int((~self.finished).sum()) - self.refused,
            "preempted": self.preempted,
            "held_back": self.held_back,
            "refused": self.refused,
            "largest_kv_tokens": self.largest_kv_tokens,
            "largest_prefill_kv_tokens": self.largest_prefill_kv_tokens,
        }


def _percentiles(name: str, seconds: Floats, quantiles: Sequence[int]) -> dict[str, float | None]:
    """Return percentiles in ms, without NaN."""
    finite = seconds[~np.isnan(seconds)]
    return {
        f"{name}_p{q}_ms": 1e3 * float(np.percentile(finite, q)) if len(finite) else None for q in quantiles
    }


def _mean(values: NDArray[Any]) -> float | None:
    return float(values.mean()) if len(values) else None
