"""Steps on a GPU, calculated from the batch and active experts of a comparison."""

from typing import Any

import pytest

from eldr_serve.scheduling.cost_file import FittedCost
from loadgen.gpu_steps import COST, add_gpu_steps
from loadgen.report import figures_table
from loadgen.results import read_rows


def rows() -> list[dict[str, Any]]:
    """Return a baseline with half of 64 experts, and a policy with a quarter and smaller batches."""
    return [
        {"policy": "shortest-queue", "batch_size": 10.0, "active_experts": 32.0},
        {
            "policy": "marginal-cost",
            "batch_size": 8.0,
            "active_experts": 16.0,
            "active_experts_baseline": "shortest-queue",
        },
    ]


def test_a_step_has_the_measured_batch_and_share_of_experts() -> None:
    base, other = all_rows = rows()
    (sentence,) = add_gpu_steps(all_rows, 64)
    cost = FittedCost.load(COST).cost
    before = 1e3 * cost.seconds(10, 10 * 1024, 48 * 128 / 2)
    after = 1e3 * cost.seconds(8, 8 * 1024, 48 * 128 / 4)
    assert (base["h100_step_ms"], other["h100_step_ms"]) == pytest.approx((before, after))
    change = 100 * (after / 8 / (before / 10) - 1)  # change of the time per token, since the batches differ
    assert other["h100_ms_per_token_change_pct"] == pytest.approx(change)
    assert f"{before:.1f} ms under shortest-queue, {after:.1f} ms under marginal-cost" in sentence
    assert sentence.endswith(f"({change:+.1f} % per token).")
    (row,) = figures_table(all_rows, ["h100_ms_per_token"])
    assert row["marginal-cost"] == f"{after / 8:.2f}\n{change:+.1f} %"


def test_without_steps_nothing_is_calculated() -> None:
    empty_rows = [row | {"batch_size": None, "active_experts": None} for row in rows()]
    assert add_gpu_steps(empty_rows, 64) == []
    assert "h100_step_ms" not in empty_rows[0]


def test_the_cost_is_that_of_the_committed_result() -> None:
    fitted = FittedCost.load(COST)
    assert fitted.source.startswith(
        "Qwen/Qwen3-30B-A3B on h100_sxm, TP 1, EP 1, experts in bfloat16; aiconfigurator"
    )
    measured = next(
        r for r in read_rows("gpu_cost") if (r["model"], r["gpu"]) == ("Qwen/Qwen3-30B-A3B", "h100_sxm")
    )
    assert 1e6 * fitted.cost.per_expert_s == pytest.approx(measured["per_expert_us"], rel=1e-3)
    assert 1e6 * fitted.cost.batch_s[64] == pytest.approx(measured["batch_us_64"], rel=1e-3)
