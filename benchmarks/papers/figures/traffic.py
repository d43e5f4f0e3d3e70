"""Recorded traffic at a chosen load, and the part of it that predictors learn from."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from loadgen.traces import RecordedArrival, read_arrival_trace
from offline.simulation.requests import Requests

SHARE_LEARNT = 0.2  # first part of a trace, from which predictors learn
KEYS = 64  # buckets of prompt length, if a trace has no prompt ids


class Traffic:
    """A request trace (Azure CSV or Mooncake JSON lines): a part for predictors, and a replayed part."""

    def __init__(self, path: Path) -> None:
        records = read_arrival_trace(path)
        cut = round(SHARE_LEARNT * len(records))
        self.past, self.played = records[:cut], records[cut:]

    def requests(self, number: int, rate_per_s: float, start: float = 0.0) -> Requests:
        """Return `number` requests at this mean rate, from the share `start` of the trace on, repeated."""
        first = int(start * len(self.played))
        played = self.played[first:] + self.played[:first]
        times = np.array([r.due_s for r in played])
        gaps = np.maximum(np.diff(times, append=times[-1] + np.median(np.diff(times))), 0)
        turns = -(-number // len(played))
        arrival_s = np.concatenate([[0.0], np.cumsum(np.tile(gaps, turns)[: number - 1])])
        arrival_s *= number / rate_per_s / arrival_s[-1]
        prompt, output = (
            np.tile(np.array([getattr(r, name) for r in played]), turns)[:number]
            for name in ("prompt_tokens", "output_tokens")
        )
        return Requests(arrival_s, prompt, output, keys=(self.keys(played) * turns)[:number])

    @property
    def mean_output_tokens(self) -> float:
        return float(np.mean([r.output_tokens for r in self.played]))

    @property
    def running_kv_tokens(self) -> float:
        """Return the KV tokens of a running request, mean over time."""
        prompt, output = (
            np.array([getattr(r, n) for r in self.played]) for n in ("prompt_tokens", "output_tokens")
        )
        return float((output * (prompt + output / 2)).sum() / output.sum())

    def keys(self, requests: list[RecordedArrival]) -> tuple[str, ...]:
        """Return the keys of the prompt-keyed predictor: the recorded prefix, or a bucket of prompt lengths.

        Azure's traces have no prompt ids. The paper permits quantiles of the length instead (C.2.1).
        """
        if any(r.hash_ids for r in self.past):
            return tuple(str(r.hash_ids) for r in requests)
        edges = np.quantile([r.prompt_tokens for r in self.past], np.linspace(0, 1, KEYS + 1)[1:-1])
        return tuple(f"length {n}" for n in np.searchsorted(edges, [r.prompt_tokens for r in requests]))

    def teach(self, predictor: object) -> None:
        """Fit a predictor to the past."""
        learn = predictor.learn  # type: ignore[attr-defined]
        for key, r in zip(self.keys(self.past), self.past, strict=True):
            learn(key, r.prompt_tokens, r.output_tokens)
