"""Step records of data-parallel ranks become those of their engine."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eldr_serve.engine.vllm.measurements import EngineMeasurements, join_ranks
from eldr_serve.scheduling.cost import StepSums

Step = list[dict[str, Any]]  # of each rank that records it


@st.composite
def step_records(draw: st.DrawFn, forward: int) -> Step:
    """Draw records of up to 3 ranks; idle ranks record nothing."""
    experts = draw(st.integers(1, 40))
    records = []
    for _ in range(draw(st.integers(0, 3))):
        record = {"requests": draw(st.integers(1, 9)), "kv_tokens": draw(st.integers(0, 99))}
        record |= {"seconds": draw(st.floats(0.001, 0.1)), "forward": forward, "engine_experts": experts}
        if draw(st.booleans()):
            record |= {"prompt_tokens": draw(st.integers(1, 50))}
        else:
            record |= {"active_by_layer": [1, 2]}
        records.append(record)
    return records


@st.composite
def histories(draw: st.DrawFn) -> list[Step]:
    return [draw(step_records(forward)) for forward in range(1, draw(st.integers(1, 12)))]


def sums(steps: list[Step]) -> StepSums:
    """Return the sums over the engine's steps, one after the other."""
    total = StepSums()
    for step in filter(None, steps):
        requests, kv_tokens = (sum(record[key] for record in step) for key in ("requests", "kv_tokens"))
        seconds = max(record["seconds"] for record in step)
        if prompt_tokens := sum(record.get("prompt_tokens", 0) for record in step):
            total += StepSums.from_prompts([requests], [kv_tokens], [prompt_tokens], [seconds])
        else:
            total += StepSums.from_steps([requests], [kv_tokens], [step[0]["engine_experts"]], [seconds])
    return total


@given(histories(), st.randoms())
def test_a_step_has_the_tokens_of_all_ranks_and_lasts_as_long_as_its_slowest(
    history: list[Step], order: Any
) -> None:
    arrivals: list[Step] = [[] for _ in range(len(history) + 1)]
    for number, step in enumerate(history):
        for record in step:
            arrivals[number + order.randrange(2)].append(record)
    measured, taken = EngineMeasurements(), StepSums()
    for arrived in [*arrivals, [{"forward": 99}]]:
        prompts = [record for record in arrived if "prompt_tokens" in record]
        measured.add_steps([record for record in arrived if "prompt_tokens" not in record], prompts)
        if order.random() < 0.5:
            taken += measured.take_steps()
    taken += measured.take_steps()
    expected = sums(history)
    for name in ("steps", "requests", "active_experts", "seconds", "token_seconds"):
        assert getattr(taken, name) == pytest.approx(getattr(expected, name))
    assert taken.prompts.tolist() == pytest.approx(expected.prompts.tolist())


def test_records_of_an_engine_without_data_parallel_ranks_are_not_joined() -> None:
    records = [{"requests": number} for number in range(9)]
    assert join_ranks(records) == (records, [])
