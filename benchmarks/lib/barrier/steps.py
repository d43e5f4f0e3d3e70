"""The joint steps of an engine's data-parallel ranks, which wait for each other in every step."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from eldr_serve.arrays import Floats, Ints

RECORD_FOLDER_ENV = "ELDR_RANK_STEPS"  # environment variable of an engine's processes


def steps_file(folder: Path, rank: int) -> Path:
    """Return the file to which a rank writes its steps."""
    return folder / f"rank_{rank}.jsonl"


@dataclass(frozen=True)
class RankSteps:
    """S steps of G ranks, in order.

    Attributes:
        start_s: float64[S], time.perf_counter() when the last of the step's ranks had scheduled it.
        seconds: float64[S], from the step's start to that of the next forward. NaN if that one is unknown.
        requests, kv_tokens: int64[S,G]; 0 for a rank without requests.
    """

    start_s: Floats
    seconds: Floats
    requests: Ints
    kv_tokens: Ints

    @property
    def spread(self) -> Ints:
        """Return the KV tokens of the fullest rank less those of the emptiest in each step, int64[S]."""
        spread: Ints = self.kv_tokens.max(axis=1) - self.kv_tokens.min(axis=1)
        return spread

    @property
    def imbalance(self) -> Ints:
        """Return the KV tokens by which all ranks together are below the fullest in each step, int64[S]."""
        ranks = self.kv_tokens.shape[1]
        imbalance: Ints = ranks * self.kv_tokens.max(axis=1) - self.kv_tokens.sum(axis=1)
        return imbalance

    @property
    def tokens_per_s(self) -> float:
        """Return the rate of generated tokens: each request of a step gets one."""
        timed = np.isfinite(self.seconds)
        return float(self.requests[timed].sum() / self.seconds[timed].sum())

    def select_period(self, from_s: float, until_s: float) -> RankSteps:
        """Return the steps that start in this period of time.perf_counter()."""
        inside = (self.start_s >= from_s) & (self.start_s < until_s)
        return RankSteps(
            self.start_s[inside], self.seconds[inside], self.requests[inside], self.kv_tokens[inside]
        )

    def to_json(self) -> dict[str, Any]:
        """Return lists from which `from_json` restores the steps."""
        return {
            "start_s": self.start_s.tolist(),
            "seconds": [s if np.isfinite(s) else None for s in self.seconds.tolist()],
            "requests": self.requests.tolist(),
            "kv_tokens": self.kv_tokens.tolist(),
        }

    @classmethod
    def from_json(cls, lists: dict[str, Any]) -> RankSteps:
        """Restore the steps of `to_json`."""
        return cls(
            np.array(lists["start_s"], np.float64),
            np.array(lists["seconds"], np.float64),  # None becomes NaN
            np.array(lists["requests"], np.int64),
            np.array(lists["kv_tokens"], np.int64),
        )


def join_ranks(lines_by_rank: Sequence[Sequence[Sequence[float]]]) -> RankSteps:
    """Join the ranks' lines by the number of the forward.

    Args:
        lines_by_rank: lines [forward, requests, KV tokens, start in s] of each rank.
    """
    forwards = sorted({int(line[0]) for lines in lines_by_rank for line in lines})
    row_of = {forward: row for row, forward in enumerate(forwards)}
    requests, kv_tokens = np.zeros((2, len(forwards), len(lines_by_rank)), np.int64)
    start_s = np.full(len(forwards), -np.inf)
    for rank, lines in enumerate(lines_by_rank):
        for forward, batch, tokens, scheduled_s in lines:
            row = row_of[int(forward)]
            requests[row, rank], kv_tokens[row, rank] = batch, tokens
            start_s[row] = max(start_s[row], scheduled_s)
    seconds = np.full(len(forwards), np.nan)
    is_next = np.diff(forwards) == 1
    seconds[:-1][is_next] = np.diff(start_s)[is_next]
    return RankSteps(start_s, seconds, requests, kv_tokens)


def read_steps(folder: Path, ranks: int) -> RankSteps:
    """Read and join the files of all ranks. The last line of each may be incomplete."""
    lines_by_rank = []
    for rank in range(ranks):
        text = steps_file(folder, rank).read_text()
        lines_by_rank.append([json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()])
    return join_ranks(lines_by_rank)
