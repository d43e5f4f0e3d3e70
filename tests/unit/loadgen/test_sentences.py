"""Sentences of a comparison: effects of placement, and clients' figures."""

from functools import partial
from typing import Any

import pytest

from loadgen.figures import policy_rows
from loadgen.sentences import client_sentences, step_sentences
from loadgen.statistics import LatencyObjective
from loadgen.trial import Trial

KEYS = ("tpot_p50_ms", "tpot_p99_ms", "ttft_p50_ms")
STEP_KEYS = ("active_experts", "engine_ms_per_token")
Change = tuple[float | None, float | None, float | None]  # a change, and its interval


def make_row(policy: str, *changes: Change, keys: tuple[str, ...] = KEYS, base: str = "") -> dict[str, Any]:
    """Make a row with these changes, in the order of the keys."""
    figures: dict[str, Any] = {"policy": policy}
    for key, change in zip(keys, changes, strict=False):
        figures |= zip((f"{key}_change_pct{end}" for end in ("", "_low", "_high")), change, strict=True)
        figures[f"{key}_baseline"] = base or ("random" if key.startswith("ttft") else "shortest-queue")
    return figures


def test_a_verdict_follows_the_interval() -> None:
    rows = [
        make_row("shortest-queue"),
        make_row("locality-band:band=0.1", (-12.34, -15.0, -9.5), (3.0, -1.0, 7.0), (8.0, 0.5, 15.0)),
    ]
    assert client_sentences(rows, rounds=4) == [
        "locality-band:band=0.1, for clients: TPOT p50 better, -12.3 % [-15.0, -9.5] against shortest-queue; "
        "TPOT p99 no significant difference, +3.0 % [-1.0, +7.0] against shortest-queue; "
        "TTFT p50 worse, +8.0 % [+0.5, +15.0] against random."
    ]


@pytest.mark.parametrize(("low", "high"), [(0.0, 2.0), (-2.0, 0.0)])
def test_an_interval_that_touches_zero_shows_nothing(low: float, high: float) -> None:
    (sentence,) = client_sentences([make_row("random"), make_row("x", (1.0, low, high))], rounds=4)
    assert "no significant difference" in sentence


def test_one_round_has_no_interval_and_gets_no_verdict() -> None:
    rows = [make_row("shortest-queue"), make_row("x", (-50.0, -60.0, -40.0))]
    (sentence,) = client_sentences(rows, rounds=1)
    assert sentence.startswith("x, for clients: TPOT p50 -50.0 % against shortest-queue")
    assert "one round has no interval" in sentence
    assert "better" not in sentence
    (unknown,) = client_sentences([make_row("shortest-queue"), make_row("x", (-50.0, None, None))], rounds=6)
    assert "there is no interval" in unknown
    assert "better" not in unknown


def test_few_rounds_are_mentioned_after_the_verdicts() -> None:
    rows = [make_row("shortest-queue"), make_row("x", (-50.0, -60.0, -40.0))]
    verdict, caution = client_sentences(rows, rounds=3)
    assert "better" in verdict
    assert "measure 4 or more" in caution
    assert len(client_sentences(rows, rounds=4)) == 1


def test_missing_measurements_and_baselines_are_reported() -> None:
    (sentence,) = client_sentences([make_row("random"), make_row("x", (None, None, None))], rounds=4)
    assert sentence == "x, for clients: TPOT p50 was not measured."
    (sentence,) = client_sentences([make_row("x"), make_row("y")], rounds=4)
    assert sentence.startswith("Nothing to compare with")
    assert client_sentences([make_row("random")], rounds=4) == []


def test_each_figure_of_a_trial_has_a_sentence() -> None:
    """Each figure has its own baseline. The baseline of a figure has no sentence for it."""
    times = {"random": (0.02, 0.1), "shortest-queue": (0.01, 0.2), "marginal-cost": (0.009, 0.15)}
    trials = [
        Trial(
            policy,
            round_,
            [
                {
                    "number": n,
                    "due_s": float(n),
                    "late_s": 0.0,
                    "end_s": 1.0,
                    "tpot_s": tpot_s,
                    "ttft_s": ttft_s,
                }
                for n in range(20)
            ],
        )
        for policy, (tpot_s, ttft_s) in times.items()
        for round_ in range(4)
    ]
    rows = policy_rows(
        list(times), trials, warm_up_s=0, seconds=20, objective=LatencyObjective(500, 50), seed=0
    )
    random, shortest, ours = client_sentences(rows, rounds=4)
    assert "TPOT p50 worse, +100.0 %" in random
    assert "TTFT" not in random
    assert (
        shortest == "shortest-queue, for clients: TTFT p50 worse, +100.0 % [+100.0, +100.0] against random."
    )
    assert "TPOT p99 better, -10.0 % [-10.0, -10.0] against shortest-queue" in ours
    assert "TTFT p50 worse, +50.0 % [+50.0, +50.0] against random" in ours


def test_the_first_sentence_is_the_effect_of_placement() -> None:
    step_row = partial(make_row, keys=STEP_KEYS)
    rows = [
        {"policy": "shortest-queue"},
        step_row("marginal-cost", (-12.04, -14.0, -10.0), (-9.0, -11.0, -7.0)),
        step_row("locality-band", (3.0, 1.0, 5.0), (2.0, -1.0, 5.0)),
        step_row("x", (-2.0, -5.0, 1.0), (-50.0, None, None)),
    ]
    assert step_sentences(rows, clock="CPU time") == [
        "marginal-cost reads 12.0 % fewer experts per step than shortest-queue [10.0, 14.0]; "
        "its steps take 9.0 % less CPU time per token [7.0, 11.0].",
        "locality-band reads 3.0 % more experts per step than shortest-queue [1.0, 5.0]; "
        "its steps take 2.0 % more CPU time per token [-1.0, 5.0], not significant in these rounds.",
        "x reads 2.0 % fewer experts per step than shortest-queue [-1.0, 5.0], not significant in these "
        "rounds; its steps take 50.0 % less CPU time per token (one round, so no interval).",
    ]
    assert "less engine time per token" in step_sentences(rows)[0]


def test_each_step_figure_names_its_own_baseline() -> None:
    measured = make_row("x", (-2.0, -3.0, -1.0), (-2.0, -3.0, -1.0), keys=STEP_KEYS, base="random")
    (sentence,) = step_sentences([measured | {"engine_ms_per_token_baseline": "round-robin"}])
    assert "experts per step than random" in sentence
    assert "time per token than round-robin" in sentence
    assert step_sentences([{"policy": "random"}]) == []
    unmeasured = {f"{key}_change_pct": None for key in STEP_KEYS}
    assert step_sentences([measured | unmeasured]) == []


def test_steps_of_a_round_are_paired_and_the_best_balancer_is_the_baseline() -> None:
    """Rounds differ tenfold and policies by a fixed share, so the paired interval has no width."""
    share = {"random": 1.0, "shortest-queue": 0.8, "marginal-cost": 0.6}
    trials = [
        Trial(
            policy,
            round_,
            [],
            {
                "active_experts": 100 * size * factor,
                "steps": 10,
                "requests": 80,
                "seconds": size * factor,
                "token_seconds": 1.0,
            },
        )
        for policy, factor in share.items()
        for round_, size in enumerate((1.0, 3.0, 10.0, 2.0))
    ]
    rows = policy_rows(
        list(share), trials, warm_up_s=0, seconds=20, objective=LatencyObjective(500, 50), seed=0
    )
    random, shortest, ours = rows
    assert "active_experts_baseline" not in shortest
    for row, change in ((random, 25.0), (ours, -25.0)):
        for key in ("active_experts", "engine_ms_per_token", "experts_per_token"):
            ends = [row[f"{key}_change_pct{end}"] for end in ("", "_low", "_high")]
            assert ends == pytest.approx([change] * 3)
            assert row[f"{key}_baseline"] == "shortest-queue"
    assert ours["active_experts"] == pytest.approx(0.6 * 100 * 4 / 10)
    # Rounds without a baseline form no pair, and a single pair has no interval.
    alone = [t for t in trials if t.policy == "marginal-cost" or (t.policy == "random" and t.round == 2)]
    objective = LatencyObjective(1, 1)
    policies = ["random", "marginal-cost"]
    (_, ours) = policy_rows(policies, alone, warm_up_s=0, seconds=9, objective=objective, seed=0)
    assert ours["active_experts_change_pct"] == pytest.approx(-40)
    assert ours["active_experts_change_pct_low"] is None
