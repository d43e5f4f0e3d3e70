"""Step records are summed for each data-parallel rank."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eldr_serve.engine.vllm.measurements import EngineMeasurements
from eldr_serve.scheduling.cost import StepSums


@st.composite
def records(draw: st.DrawFn) -> tuple[int, dict[str, Any]]:
    """Draw a rank and the record of one of its steps."""
    record = {"requests": draw(st.integers(1, 9)), "kv_tokens": draw(st.integers(0, 99))}
    record |= {"seconds": draw(st.floats(0.001, 0.1))}
    if draw(st.booleans()):
        key = draw(st.sampled_from(("prompt_tokens", "local_prompt_tokens")))
        record |= {key: draw(st.integers(1, 50))}
    else:
        record |= {"active_by_layer": draw(st.lists(st.integers(1, 8), min_size=2, max_size=2))}
    return draw(st.integers(0, 2)), record


def sums(record: dict[str, Any]) -> StepSums:
    sizes = [[record[key]] for key in ("requests", "kv_tokens")]
    if "prompt_tokens" in record:
        return StepSums.from_prompts(*sizes, [record["prompt_tokens"]], [record["seconds"]])
    if "local_prompt_tokens" in record:
        return StepSums.from_local_prompts(*sizes, [record["local_prompt_tokens"]], [record["seconds"]])
    return StepSums.from_steps(*sizes, [sum(record["active_by_layer"])], [record["seconds"]])


@given(st.lists(records(), max_size=20), st.randoms())
def test_each_ranks_steps_are_taken_once(history: list[tuple[int, dict[str, Any]]], order: Any) -> None:
    measured, expected, sums_by_rank = EngineMeasurements(), [StepSums()] * 3, [StepSums()] * 3
    for rank, record in history:
        expected[rank] += sums(record)
        is_prompt = "active_by_layer" not in record
        measured.add_steps([] if is_prompt else [record], [record] if is_prompt else [], rank)
        if order.random() < 0.3:
            sums_by_rank[rank] += measured.take_steps(rank)
    for rank in range(3):
        sums_by_rank[rank] += measured.take_steps(rank)
        for name in ("steps", "requests", "active_experts", "seconds", "token_seconds"):
            assert getattr(sums_by_rank[rank], name) == pytest.approx(getattr(expected[rank], name))
        for name in ("prompts", "local_prompts"):
            sums_of_rank, sums_expected = getattr(sums_by_rank[rank], name), getattr(expected[rank], name)
            assert sums_of_rank.tolist() == pytest.approx(sums_expected.tolist())
