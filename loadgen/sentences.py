"""Results of a comparison as sentences: the effects of placement, then the clients' figures."""

from __future__ import annotations

from typing import Any

from loadgen.figures import BASELINES
from loadgen.statistics import ROUNDS_TO_RESAMPLE

_CLIENT = {"tpot_p50_ms": "TPOT p50", "tpot_p99_ms": "TPOT p99", "ttft_p50_ms": "TTFT p50"}


def step_sentences(rows: list[dict[str, Any]], *, clock: str = "engine time") -> list[str]:
    """Return one sentence for each policy that has a baseline, on its experts and time per decode step.

    Changes are relative to the baseline, the best load balancer in that figure, with 95 % intervals
    over paired rounds.

    Args:
        rows: rows of loadgen.figures.
        clock: name of the time that engines report: "CPU time" on CPUs, else "engine time".
    """
    figures = (
        ("active_experts", "reads", ("fewer experts", "more experts"), "per step"),
        ("engine_ms_per_token", "its steps take", (f"less {clock}", f"more {clock}"), "per token"),
    )
    sentences = []
    for row in rows:
        clauses, named = [], ""
        for key, verb, words, per in figures:
            if row.get(f"{key}_change_pct") is None:
                continue  # the figure was not measured, or the policy is the baseline
            than = "" if row[f"{key}_baseline"] == named else f" than {row[f'{key}_baseline']}"
            named = row[f"{key}_baseline"]
            change = row[f"{key}_change_pct"]
            size = f"{abs(change):.1f} % {words[change > 0]} {per}{than}"
            clauses.append(f"{verb} {size} {_interval_text(row, key)}")
        if clauses:
            sentences.append(f"{row['policy']} {'; '.join(clauses)}.")
    return sentences


def _interval_text(row: dict[str, Any], key: str) -> str:
    """Return the interval of a change as positive numbers in the direction of the change."""
    change, low, high = (row[f"{key}_change_pct{end}"] for end in ("", "_low", "_high"))
    if low is None or high is None:
        return "(one round, so no interval)"
    if change <= 0:
        low, high = -high, -low
    return f"[{low:.1f}, {high:.1f}]" + ("" if low > 0 else ", not significant in these rounds")


def client_sentences(rows: list[dict[str, Any]], rounds: int) -> list[str]:
    """Return one sentence for each policy that is not the baseline of all figures, and a warning, if any.

    Changes are in % of the baseline, the best load balancer in the same figure, with 95 % intervals.
    Below 0 is faster.

    Args:
        rows: rows of loadgen.figures.
        rounds: number of trials of each policy.
    """
    sentences = []
    for row in rows:
        clauses = [_client_clause(row, key, rounds) for key in _CLIENT if f"{key}_baseline" in row]
        if clauses:
            sentences.append(f"{row['policy']}, for clients: {'; '.join(clauses)}.")
    if not sentences and len(rows) > 1:
        return [f"Nothing to compare with: no load balancer ({', '.join(BASELINES)}) was measured."]
    if sentences and 1 < rounds < ROUNDS_TO_RESAMPLE:
        sentences.append(
            f"The clients' intervals of {rounds} rounds do not include differences between rounds: measure "
            f"{ROUNDS_TO_RESAMPLE} or more rounds before you rely on them."
        )
    return sentences


def _client_clause(row: dict[str, Any], key: str, rounds: int) -> str:
    change, low, high = (row.get(f"{key}_change_pct{end}") for end in ("", "_low", "_high"))
    name, against = _CLIENT[key], f"against {row[f'{key}_baseline']}"
    if change is None:
        return f"{name} was not measured"
    if rounds < 2 or low is None or high is None:
        which = "one round has" if rounds < 2 else "there is"
        return f"{name} {change:+.1f} % {against} (uncertainty unknown: {which} no interval)"
    verdict = "better" if high < 0 else "worse" if low > 0 else "no significant difference"
    return f"{name} {verdict}, {change:+.1f} % [{low:+.1f}, {high:+.1f}] {against}"
