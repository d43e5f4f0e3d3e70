"""Rows of the replay benchmarks."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from benchmarks.lib.replay.schedule import ReplayCase
from loadgen.statistics import paired_change_percent

LAYERS = 6  # MoE layers of the demo model


def arm_rows(case: ReplayCase, baselines: Sequence[str], seed: int) -> list[dict[str, Any]]:
    """Return a row for each arm, with its changes against the best baseline at each percentile.

    The best of several equivalent baselines is biased low. `pooled` compares with all their requests.
    """
    rows = []
    measured, first = case.tpot_s, case.first_s
    pool = np.concatenate([measured[b] for b in baselines])
    for label, tpot in measured.items():
        steps, outcome = case.steps[label], case.outcomes[label]
        row: dict[str, Any] = {"workload": case.load.group, "workers": case.load.workers}
        row |= {"rate_per_s": round(case.rate, 2), "arm": label}
        for q in (50, 99):
            of_q = partial(np.percentile, q=q)
            row[f"tpot_p{q}_ms"] = 1e3 * float(of_q(tpot))
            best = min((measured[b] for b in baselines), key=of_q)
            change = paired_change_percent(tpot, best, of_q, seed=seed)
            row |= zip((f"p{q}_change_pct", f"p{q}_low_pct", f"p{q}_high_pct"), change, strict=True)
            if len(baselines) > 1:
                row[f"p{q}_pooled_change_pct"] = 100 * float(of_q(tpot) / of_q(pool) - 1)
        rows.append(
            row
            | {
                "first_token_p50_ms": 1e3 * float(np.median(first[label])),
                "active_experts": float(np.mean(steps.experts)) / LAYERS,
                "batch_size": float(np.mean(steps.requests)),
                "step_ms": 1e3 * float(np.mean(steps.seconds)),
                "simulated_p50_ms": 1e3 * float(np.percentile(outcome.tpot_s, 50)),
                "simulated_p99_ms": 1e3 * float(np.percentile(outcome.tpot_s, 99)),
            }
        )
    return rows


def experts_by_batch(case: ReplayCase, labels: Sequence[str]) -> list[dict[str, Any]]:
    """Return mean active experts of a layer by batch size, in bins of 4 requests, one row per bin."""
    top = max(max(case.steps[label].requests) for label in labels)
    rows = []
    for low in range(1, top + 1, 4):
        row: dict[str, Any] = {"workload": case.load.group, "workers": case.load.workers}
        row |= {"batch_from": low, "batch_to": low + 3}
        for label in labels:
            steps = case.steps[label]
            inside = [e for n, e in zip(steps.requests, steps.experts, strict=True) if low <= n < low + 4]
            row[f"{label}: steps"] = len(inside)
            row[f"{label}: active_experts"] = float(np.mean(inside)) / LAYERS if inside else None
        rows.append(row)
    return rows
