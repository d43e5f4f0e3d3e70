"""The result tables of the benchmarks of EP engines, with the papers' figures beside them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from benchmarks.lib.ep.batches import SKIPPED_STEPS
from loadgen.statistics import median_ci, paired_change_percent

PHASES = ("before", "first after", "after")  # windows, seen from the shift of domains
BASE = "linear, none"  # name of the baseline's arm, at replication 1
EVEN = "eplb, even"
# How an engine gets the placement of its position: in the paper, here, and never.
STARTS, MIGRATES, KEEPS = "starts with it", "migrates to it", "keeps another"
BY_EXPERTS = "by experts"  # end of an arm's name
_PAPERS: dict[str, dict[str, Any]] = {
    # METRO, from replication 1.5: EPLB's even spread against no replicas, and METRO's choice against EPLB's.
    EVEN: {"paper_experts_pct": 30.0, "paper_step_pct": 14.0},
    "metro": {"paper_experts_pct": -42.3},
    # GRACE-MoE's groups against linear blocks within a node, three models: papers/figures/grace.py.
    "grace, none": {"paper_moved_pct": "-10.0 / -25.1 / -35.8"},
}
_PAPER_PROACTIVE = "-39..-58"  # DIRECTOR's proactive placement on 32 GPUs against a static one


def choice_rows(
    measured: dict[tuple[float, str], list[dict[str, Any]]],
    batch: int,
    seed: int,
    attention: str = "tensor-parallel",
) -> Iterator[dict[str, Any]]:
    """Yield a row for each arm from what was measured in each round."""
    base = next(trials for (ratio, name), trials in measured.items() if (ratio, name) == (1.0, BASE))
    for (ratio, name), trials in measured.items():
        placement, choice, *homes = name.split(", ")
        in_blocks = measured[ratio, f"{placement}, {choice}"]
        even = measured.get((ratio, EVEN))
        papers: dict[str, Any] = _PAPERS.get(name if choice != "metro" else choice, {})
        if name == EVEN and ratio < 1.5:
            papers = {}
        yield {
            "attention": attention,
            "replication": ratio,
            "batch_size": batch,
            "placement": placement,
            "choice": choice,
            "homes": homes[0] if homes else "equal blocks",
            **_interval("step", trials),
            **_means(
                trials,
                (
                    "worst_rank_experts",
                    "experts_all_ranks",
                    "worst_rank_pairs",
                    "pairs_off_home_pct",
                    "other_ranks_per_token",
                ),
            ),
            **_change("change", trials, base, "step_ms", seed),
            **(_change("even", trials, even, "step_ms", seed) if even else {}),
            **({"experts_vs_even_pct": _mean_pct(trials, even, "worst_rank_experts")} if even else {}),
            "none_experts_pct": _mean_pct(trials, base, "worst_rank_experts"),
            "moved_vs_base_pct": _mean_pct(trials, base, "other_ranks_per_token"),
            **(_change("blocks", trials, in_blocks, "step_ms", seed) if homes else {}),
            **(
                {"moved_vs_blocks_pct": _mean_pct(trials, in_blocks, "other_ranks_per_token")}
                if homes
                else {}
            ),
            "requests_equal_pct": _equal_pct(trials, base),
            "paper_experts_pct": None,
            "paper_step_pct": None,
            "paper_moved_pct": None,
            **papers,
        }


def shift_rows(
    measured: dict[str, list[list[dict[str, Any]]]], seed: int, attention: str = "tensor-parallel"
) -> Iterator[dict[str, Any]]:
    """Yield a row for each arm and phase from what was measured in each round and window."""
    windows = len(measured["offline"][0])
    middle = windows // 2
    parts = range(middle), range(middle, middle + 1), range(middle + 1, windows)
    for name, turns in measured.items():
        for phase, part in zip(PHASES, parts, strict=True):
            trials = [turn[window] for turn in turns for window in part]
            base = [turn[window] for turn in measured["offline"] for window in part]
            yield {
                "attention": attention,
                "placement": name,
                "phase": phase,
                "windows": len(trials),
                **_interval("step", trials),
                **_change("step", trials, base, "step_ms", seed),
                "with_moves_ms": float(np.median([trial["with_moves_ms"] for trial in trials])),
                **_change("with_moves", trials, base, "with_moves_ms", seed),
                **_means(
                    trials,
                    (
                        "worst_rank_experts",
                        "worst_rank_pairs",
                        "other_ranks_per_token",
                        "plan_ms",
                        "migration_ms",
                        "experts_moved",
                        "slices",
                        "slices_left",
                    ),
                ),
                "requests_equal_pct": _equal_pct(trials, base),
                "paper_pct": _PAPER_PROACTIVE if name.startswith("proactive") else None,
            }


def start_rows(
    measured: dict[str, list[dict[str, Any]]], workload: str, seed: int
) -> Iterator[dict[str, Any]]:
    """Yield a row for each way to a placement, from what was measured with each batch.

    Every way is measured in the steps during and after the migration of the same batch.
    """
    slices = [trial["slices"] for trial in measured[MIGRATES]]
    by_way = {
        way: [_split_steps(trial, number) for trial, number in zip(trials, slices, strict=True)]
        for way, trials in measured.items()
    }
    base = by_way[STARTS]
    for way, trials in by_way.items():
        row: dict[str, Any] = {"workload": workload, "engine": way, "batches": len(trials)}
        for name in ("during", "with_moves", "after"):
            row |= _interval(name, trials) | _change(name, trials, base, f"{name}_ms", seed)
        yield {
            **row,
            **_means(trials, ("slices", "experts_moved", "received_mib", "migration_ms", "holds_after_ms")),
            "requests_equal_pct": _equal_pct(trials, base),
        }


def _split_steps(trial: dict[str, Any], slices: int) -> dict[str, Any]:
    """Return the trial with its medians over the steps during and after a migration of so many slices.

    The first slice follows the first step, so as many steps as slices end before the placement holds.
    """
    steps_ms, first = np.array(trial["steps_ms"]), max(slices, SKIPPED_STEPS + 1)
    during_ms = float(np.median(steps_ms[SKIPPED_STEPS:first]))
    return trial | {
        "during_ms": during_ms,
        "with_moves_ms": during_ms + trial["migration_ms"] / max(trial["slices"], 1),
        "after_ms": float(np.median(steps_ms[first:])),
        "holds_after_ms": trial["migration_ms"] + float(steps_ms[1 : trial["slices"]].sum()),
    }


def _interval(name: str, trials: list[dict[str, Any]]) -> dict[str, float]:
    value, low, high = median_ci([trial[f"{name}_ms"] for trial in trials])
    return {f"{name}_ms": value, f"{name}_low_ms": low, f"{name}_high_ms": high}


def _means(trials: list[dict[str, Any]], keys: tuple[str, ...]) -> dict[str, float]:
    return {key: float(np.mean([trial[key] for trial in trials])) for key in keys}


def _change(
    name: str, trials: list[dict[str, Any]], base: list[dict[str, Any]], key: str, seed: int
) -> dict[str, float]:
    values, base_values = (np.array([trial[key] for trial in some]) for some in (trials, base))
    change = paired_change_percent(values, base_values, np.median, seed=seed)
    return dict(zip((f"{name}_pct", f"{name}_low_pct", f"{name}_high_pct"), change, strict=True))


def _mean_pct(trials: list[dict[str, Any]], base: list[dict[str, Any]], key: str) -> float:
    value, base_value = (float(np.mean([trial[key] for trial in some])) for some in (trials, base))
    return 100 * (value / base_value - 1)


def _equal_pct(trials: list[dict[str, Any]], base: list[dict[str, Any]]) -> float:
    """Return the share of equal answers in percent."""
    pairs = [
        answer == base_answer
        for trial, base_trial in zip(trials, base, strict=True)
        for answer, base_answer in zip(trial["answers"], base_trial["answers"], strict=True)
    ]
    return 100 * float(np.mean(pairs))
