"""The fit to recorded kernel times, active experts of the package's routing, and what placement can save."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from scipy.optimize import lsq_linear

from eldr_serve.errors import UserInputError
from eldr_serve.gpu_cost.expected import expected_steps
from eldr_serve.gpu_cost.fitting import fit
from eldr_serve.gpu_cost.readings import Readings, Shape
from eldr_serve.gpu_cost.routing import active_experts, independent_experts, shared_experts
from eldr_serve.preflight.step_times import times_of
from eldr_serve.scheduling import StepCost
from tests.support.shipped import ROOT

RECORDED = json.loads((ROOT / "tests/unit/recorded/gpu_readings.json").read_text())
QWEN, EP = (Readings.from_json(json.dumps(one)) for one in RECORDED.values())
SHAPE = Shape(experts=128, top_k=8, layers=48, ranks=1, skew=1.2, dtype="bfloat16")


def test_the_fit_to_real_kernel_times_is_close() -> None:
    result = fit(QWEN)
    # NVIDIA's rows of the kernel alone give the same.
    assert result.cost.per_expert_s == pytest.approx(3.1e-6, rel=0.05)
    assert abs(result.errors).max() < 0.05
    is_skewed = [step.routing == "skewed" for step in EP.steps]
    assert abs(fit(EP).errors[is_skewed]).max() < 0.05
    summary = result.summary()
    assert summary["error_rms"] < 0.02
    assert summary["per_expert_us"] == pytest.approx(1e6 * result.cost.per_expert_s)
    assert abs(fit(EP).errors).max() < 0.1


def test_the_terms_have_the_least_squares() -> None:
    """Another solver finds the same terms for experts and KV tokens; no neighbouring table fits better."""
    cost, steps = fit(QWEN).cost, QWEN.steps
    requests = np.array([step.requests for step in steps])
    tokens = requests * [step.context for step in steps]
    experts = np.array([48 * active_experts(s.requests, s.routing, QWEN.shape) for s in steps])
    seconds = np.array([step.seconds for step in steps])
    design = np.column_stack([requests[:, None] >= np.unique(requests), 1e3 * tokens, experts])
    best = lsq_linear(design / seconds[:, None], np.ones(len(steps)), (0, np.inf), tol=1e-14).x
    assert (1e-3 * cost.per_kv_token_s, cost.per_expert_s) == pytest.approx(best[-2:], rel=1e-3)

    is_skewed = np.array([step.routing == "skewed" for step in steps])

    def squares(some: StepCost) -> float:
        return float(np.sum((some.seconds(requests, tokens, experts) / seconds - 1)[is_skewed] ** 2))

    sizes, added = [*cost.batch_s], np.diff([*cost.batch_s.values()], prepend=0)
    for factor in (0.99, 1.01):
        assert squares(replace(cost, fixed_s=factor * cost.fixed_s)) > squares(cost)
        for number in np.flatnonzero(added):
            other = added.copy()
            other[number] *= factor
            table = dict(zip(sizes, np.cumsum(other).tolist(), strict=True))
            assert squares(replace(cost, batch_s=table)) > squares(cost)


def test_the_table_has_a_row_for_each_batch_and_routing() -> None:
    rows = fit(QWEN).table()
    assert [(row["batch"], row["routing"]) for row in rows[:2]] == [(1, "even"), (2, "even")]
    assert len(rows) == 16
    assert {"1,024 tokens", "4,096 tokens"} <= set(rows[0])


def test_the_file_names_its_source() -> None:
    file = fit(EP).file()
    assert file.cost.per_expert_s > 0
    assert "Qwen3-235B-A22B-FP8 on h100_sxm, TP 4, EP 4, experts in fp8_block" in file.source
    assert "aiconfigurator-core 0.12.0" in file.source


def test_a_batch_beyond_the_readings_is_on_the_last_straight_line() -> None:
    cost = fit(QWEN).cost
    (_, second_to_last_s), (last, last_s) = [*cost.batch_s.items()][-2:]
    assert last == 64
    beyond = cost.seconds(80, 0, 0) - cost.seconds(64, 0, 0)
    assert beyond == pytest.approx(last_s - second_to_last_s)  # 48 to 64 is as far as 64 to 80


def test_one_batch_needs_no_table() -> None:
    cost = fit(replace(QWEN, steps=tuple(step for step in QWEN.steps if step.requests == 16))).cost
    assert cost.batch_s == {}
    assert cost.per_expert_s == pytest.approx(3.1e-6, rel=0.05)


def test_steps_that_do_not_show_what_an_expert_costs_are_refused() -> None:
    falling = tuple(replace(step, seconds=1 / step.requests) for step in QWEN.steps)
    with pytest.raises(UserInputError, match="do not show what an expert costs"):
        fit(replace(QWEN, steps=falling))


@pytest.mark.parametrize("field", ["steps", "prompt_steps"])
def test_readings_without_steps_are_refused_in_one_sentence(field: str) -> None:
    with pytest.raises(UserInputError, match=rf"\A{field} of {QWEN.setting.model} is empty: give"):
        replace(QWEN, **{field: ()})


@pytest.mark.parametrize("requests", [1, 2, 4, 8, 16, 48])
def test_even_routing_activates_as_many_experts_as_possible(requests: int) -> None:
    assert active_experts(requests, "even", SHAPE) == min(8 * requests, 128)
    assert active_experts(requests, "even", replace(SHAPE, ranks=4)) == min(2 * requests, 32)


def test_skewed_routing_activates_fewer_experts_and_all_tokens_have_theirs() -> None:
    skewed = [active_experts(n, "skewed", SHAPE) for n in (1, 2, 4, 8, 16, 32, 64)]
    assert skewed == sorted(skewed)
    assert skewed[0] == 8
    assert all(8 <= active <= 128 for active in skewed)
    assert skewed[4] < 0.6 * 128
    # The rows of the kernel at 16 tokens: 209 us with skewed routing, and 26 us + 3.1 us per expert.
    assert skewed[4] == pytest.approx((209 - 26) / 3.1, rel=0.03)


def test_the_busiest_rank_has_more_than_its_share() -> None:
    ranks = replace(SHAPE, ranks=4)
    assert active_experts(8, "skewed", SHAPE) / 4 < active_experts(8, "skewed", ranks) <= 32
    assert independent_experts(8, SHAPE) / 4 < independent_experts(8, ranks) <= 32


def test_independent_requests_activate_the_expected_number() -> None:
    rng = np.random.default_rng(1)
    numbers = [len(np.unique(rng.random((8, 128)).argsort(axis=1)[:, :8])) for _ in range(400)]
    assert independent_experts(8, SHAPE) == pytest.approx(np.mean(numbers), rel=0.02)
    assert shared_experts(SHAPE) == independent_experts(1, SHAPE) == pytest.approx(8)


def test_the_bound_of_placement_is_the_step_in_which_all_requests_share_their_experts() -> None:
    cost = fit(QWEN).cost
    batch_1, batch_8, batch_32 = expected_steps(cost, SHAPE)
    assert (batch_1.requests, batch_8.requests, batch_32.requests) == (1, 8, 32)
    assert batch_1.most_saved == pytest.approx(0)
    together = cost.seconds(8, 8 * 1024, 48 * 8)
    assert batch_8.seconds * (1 - batch_8.most_saved) == pytest.approx(together)
    assert 0 < batch_8.most_saved < batch_8.experts_share < batch_32.experts_share < 1


def test_the_check_prints_one_line_about_the_expected_step() -> None:
    line = times_of(QWEN).describe("decode")
    assert line.startswith("decode: expected decode step at batch 1 / 8 / 32: 4.7 / 11.")
    assert "placement saves at most 0% / " in line
    assert "\n" not in line
