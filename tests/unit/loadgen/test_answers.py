"""What a comparison says first: better, worse, or nothing that can be told."""

from __future__ import annotations

from typing import Any

import pytest

from loadgen.answers import answers
from loadgen.figures import policy_rows
from loadgen.trial import Trial
from tools.stats import Slo

KEYS = ("tpot_p50_ms", "tpot_p99_ms", "ttft_p50_ms")


def row(policy: str, *changes: tuple[float | None, float | None, float | None]) -> dict[str, Any]:
    """With these changes and their intervals, in the order of KEYS."""
    found: dict[str, Any] = {"policy": policy}
    for key, change in zip(KEYS, changes, strict=False):
        found |= zip((f"{key}_change_pct{end}" for end in ("", "_low", "_high")), change, strict=True)
        found[f"{key}_baseline"] = "random" if key.startswith("ttft") else "shortest-queue"
    return found


def test_a_verdict_is_where_the_interval_lies() -> None:
    rows = [
        row("shortest-queue"),
        row("locality-band:band=0.1", (-12.34, -15.0, -9.5), (3.0, -1.0, 7.0), (8.0, 0.5, 15.0)),
    ]
    assert answers(rows, rounds=4) == [
        "locality-band:band=0.1: TPOT p50 better, -12.3 % [-15.0, -9.5] against shortest-queue; "
        "TPOT p99 no difference that these rounds can tell, +3.0 % [-1.0, +7.0] against shortest-queue; "
        "TTFT p50 worse, +8.0 % [+0.5, +15.0] against random."
    ]


@pytest.mark.parametrize(("low", "high"), [(0.0, 2.0), (-2.0, 0.0)])
def test_an_interval_that_touches_zero_shows_nothing(low: float, high: float) -> None:
    (said,) = answers([row("random"), row("x", (1.0, low, high))], rounds=4)
    assert "no difference that these rounds can tell" in said


def test_one_round_has_no_interval_and_gets_no_verdict() -> None:
    rows = [row("shortest-queue"), row("x", (-50.0, -60.0, -40.0))]
    (said,) = answers(rows, rounds=1)
    assert said.startswith("x: TPOT p50 -50.0 % against shortest-queue")
    assert "one round has no interval" in said
    assert "better" not in said
    (unknown,) = answers([row("shortest-queue"), row("x", (-50.0, None, None))], rounds=6)
    assert "there is no interval" in unknown
    assert "better" not in unknown


def test_few_rounds_are_said_after_the_verdicts() -> None:
    rows = [row("shortest-queue"), row("x", (-50.0, -60.0, -40.0))]
    verdict, caution = answers(rows, rounds=3)
    assert "better" in verdict
    assert "measure 4 or more" in caution
    assert len(answers(rows, rounds=4)) == 1


def test_what_was_not_measured_or_has_no_baseline_is_said() -> None:
    (said,) = answers([row("random"), row("x", (None, None, None))], rounds=4)
    assert said == "x: TPOT p50 was not measured."
    (said,) = answers([row("x"), row("y")], rounds=4)
    assert said.startswith("Nothing to compare with")
    assert answers([row("random")], rounds=4) == []


def test_figures_of_trials_are_answered() -> None:
    """Each figure against its own baseline; a balancer that is one itself, only where it is not."""
    times = {"random": (0.02, 0.1), "shortest-queue": (0.01, 0.2), "marginal-cost": (0.009, 0.15)}
    trials = [
        Trial(policy, round_, [
            {"number": n, "due_s": float(n), "late_s": 0.0, "end_s": 1.0, "tpot_s": tpot_s, "ttft_s": ttft_s}
            for n in range(20)
        ])
        for policy, (tpot_s, ttft_s) in times.items()
        for round_ in range(4)
    ]  # fmt: skip
    rows = policy_rows(list(times), trials, warm_up_s=0, seconds=20, slo=Slo(500, 50), seed=0)
    random, shortest, ours = answers(rows, rounds=4)
    assert "TPOT p50 worse, +100.0 %" in random
    assert "TTFT" not in random
    assert shortest == "shortest-queue: TTFT p50 worse, +100.0 % [+100.0, +100.0] against random."
    assert "TPOT p99 better, -10.0 % [-10.0, -10.0] against shortest-queue" in ours
    assert "TTFT p50 worse, +50.0 % [+50.0, +50.0] against random" in ours
