"""What a comparison answers: does a policy help, by how much, and how sure is that."""

from __future__ import annotations

from typing import Any

from loadgen.figures import BASELINES
from tools.stats import ROUNDS_TO_RESAMPLE

_ASKED = {"tpot_p50_ms": "TPOT p50", "tpot_p99_ms": "TPOT p99", "ttft_p50_ms": "TTFT p50"}


def answers(rows: list[dict[str, Any]], rounds: int) -> list[str]:
    """One sentence a policy that is not the baseline of all its figures; then what bounds their certainty.

    Changes are in % of the baseline, the best policy by load alone in that very figure, with their 95 %
    interval; below 0 is faster.

    Args:
        rows: of loadgen.figures.
        rounds: trials of each policy.
    """
    found = []
    for row in rows:
        clauses = [_clause(row, key, rounds) for key in _ASKED if f"{key}_baseline" in row]
        if clauses:
            found.append(f"{row['policy']}: {'; '.join(clauses)}.")
    if not found and len(rows) > 1:
        return [f"Nothing to compare with: no policy by load alone ({', '.join(BASELINES)}) was measured."]
    if found and 1 < rounds < ROUNDS_TO_RESAMPLE:
        found.append(
            f"How rounds differ is not in the intervals of {rounds} rounds: measure {ROUNDS_TO_RESAMPLE} or "
            "more before you believe them."
        )
    return found


def _clause(row: dict[str, Any], key: str, rounds: int) -> str:
    change, low, high = (row.get(f"{key}_change_pct{end}") for end in ("", "_low", "_high"))
    name, against = _ASKED[key], f"against {row[f'{key}_baseline']}"
    if change is None:
        return f"{name} was not measured"
    if rounds < 2 or low is None or high is None:
        which = "one round has" if rounds < 2 else "there is"
        return f"{name} {change:+.1f} % {against} (how sure is not known: {which} no interval)"
    verdict = "better" if high < 0 else "worse" if low > 0 else "no difference that these rounds can tell"
    return f"{name} {verdict}, {change:+.1f} % [{low:+.1f}, {high:+.1f}] {against}"
