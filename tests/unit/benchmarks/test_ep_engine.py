"""What the benchmarks of EP engines make of what they measured; the engines are in tests/engine."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from benchmarks.ep_engine import PHASES, choice_rows, disjoint, shift_rows, spread
from eldr_serve.expert_placement import placement_id


def measured(step_ms: float, experts: float = 10.0, answers: str = "ab", **others: float) -> dict[str, Any]:
    figures = {"experts_all_ranks": 18.0, "worst_rank_pairs": 16.0, "away_pct": 50.0}
    return {"step_ms": step_ms, "worst_rank_experts": experts, "answers": list(answers)} | figures | others


def test_batches_share_a_request_only_when_there_are_no_others() -> None:
    among = np.arange(10, 21)
    first, second, third = disjoint(among, 5, 3, np.random.default_rng(0))
    assert set(first) | set(second) < set(among.tolist())
    assert len(set(first) | set(second)) == 10
    assert len(set(third)) == 5


def test_a_placement_in_more_slots_is_the_same_placement() -> None:
    rows = np.array([[0, 1, 2, 0], [2, 1, 0, 1]])
    found = spread(rows, 8, 2)
    assert found.tolist() == [[0, 1, -1, -1, 2, 0, -1, -1], [2, 1, -1, -1, 0, 1, -1, -1]]
    assert placement_id(found, 2) == placement_id(rows, 2)
    assert spread(rows, 4, 2).tolist() == rows.tolist()


def test_a_choice_is_held_against_no_replicas_and_against_even_spread() -> None:
    arms = {
        (1.0, "linear, none"): [measured(10), measured(20), measured(30)],
        (1.5, "eplb, even"): [measured(12, 13), measured(24, 13), measured(36, 13)],
        (1.5, "eplb, metro"): [measured(9, 9), measured(18, 9), measured(27, 9, "ax")],
    }
    base, even, metro = choice_rows(arms, 8, 0)
    assert [row["step_ms"] for row in (base, even, metro)] == [20, 24, 18]
    assert [row["change_pct"] for row in (base, even, metro)] == pytest.approx([0, 20, -10])
    assert metro["change_low_pct"] == pytest.approx(-10)  # each round is held against its own
    assert metro["even_pct"] == pytest.approx(-25)
    assert metro["even_experts_pct"] == pytest.approx(100 * (9 / 13 - 1))
    assert even["none_experts_pct"] == pytest.approx(30)
    assert [row["requests_equal_pct"] for row in (base, even)] == [100, 100]
    assert metro["requests_equal_pct"] == pytest.approx(500 / 6)
    assert "even_pct" not in base


def test_a_shift_is_told_by_its_phases_and_moves_are_not_forgotten() -> None:
    moves = {"plan_ms": 5.0, "migration_ms": 40.0, "experts_moved": 8, "slices": 4, "slices_left": 1}

    def windows(step: float, moved: float) -> list[dict[str, Any]]:
        return [measured(step + n, **moves, with_moves_ms=step + n + moved) for n in range(4)]

    rows = list(shift_rows({"offline": [windows(10, 0)] * 2, "proactive": [windows(8, 4), windows(8, 4)]}, 0))
    assert [(row["placement"], row["phase"], row["windows"]) for row in rows] == [
        (name, phase, number)
        for name in ("offline", "proactive")
        for phase, number in zip(PHASES, (4, 2, 2), strict=True)
    ]
    last = rows[-1]
    assert last["step_pct"] == pytest.approx(100 * (11 / 13 - 1))
    assert last["with_moves_pct"] == pytest.approx(100 * (15 / 13 - 1))
    assert (last["slices"], last["slices_left"], last["plan_ms"]) == (4, 1, 5)
