"""Rows of steps with prescribed experts, without an engine."""

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from benchmarks.engine.step_cost import (
    PACKAGE,
    TimedStep,
    fit_rows,
    package_rows,
    point_rows,
    prescribe_experts,
    prescribed_steps,
)
from eldr_serve.scheduling import StepCost
from tests.support.in_process import command, sentence

LAYERS = 3
COST = StepCost(2e-3, 5e-5, 0.0, 3e-6)


class FakeStepEngine:
    """A fake that reports the time of a step one step later, as a GPU does. A lossy one omits an expert."""

    def __init__(self, *, lossy: bool = False) -> None:
        self._lossy, self._batch, self._number = lossy, 0, 100
        self._last: list[dict[str, Any]] = []
        self.drained = False

    def start(self, prompts: list[list[int]], tokens: int) -> None:
        self._batch = len(prompts)

    def run_step(self, routed: NDArray[np.int64]) -> list[dict[str, Any]]:
        assert len(routed) == self._batch
        active = len(np.unique(routed)) - self._lossy
        seconds = float(COST.seconds(self._batch, 0, LAYERS * active))
        record = {"step": self._number, "requests": self._batch, "active_by_layer": [active] * LAYERS}
        known, self._last = self._last, [record | {"seconds": seconds, "took": seconds + 1e-3}]
        self._number += 1
        return known

    def drain(self) -> None:
        self.drained = True


def steps_of(engine: Any, batch: int) -> list[TimedStep]:
    return prescribed_steps(engine, [[1]] * batch, [8, 12, 16], 5, np.random.default_rng(0))


def test_every_point_is_timed_as_requested_and_the_cost_is_recovered() -> None:
    engine = FakeStepEngine()
    steps = steps_of(engine, 4) + steps_of(engine, 8)
    assert engine.drained
    assert Counter((s.requests, s.experts) for s in steps) == {
        (batch, LAYERS * active): 5 for batch in (4, 8) for active in (8, 12, 16)
    }
    points = point_rows([*steps, *steps], LAYERS)
    assert Counter((row["batch_size"], row["steps"]) for row in points) == {(4, 10): 3, (8, 10): 3}
    assert all(row["step_p50_ms"] == pytest.approx(row["forward_p50_ms"] + 1) for row in points)
    forward, step = fit_rows([*steps, *steps])
    assert forward["fixed_ms"] == pytest.approx(2, rel=1e-3)
    assert step["fixed_ms"] == pytest.approx(3, rel=1e-3)
    for row in (forward, step):
        assert row["per_request_us"] == pytest.approx(50, rel=1e-3)
        assert row["per_expert_us"] == pytest.approx(3, rel=1e-3)
        assert row["r2"] == pytest.approx(1)


def test_a_step_with_wrong_activations_ends_the_run() -> None:
    with pytest.raises(RuntimeError, match="should activate"):
        steps_of(FakeStepEngine(lossy=True), 4)


def test_a_second_table_replaces_the_first() -> None:
    hooked: list[list[list[int]]] = []

    class Capture:
        def store_choices(self, layer: int, experts: torch.Tensor) -> None:
            hooked.append(experts.tolist())

    for expert in (1, 2):
        prescribe_experts(Capture, torch.full((4, 2), expert))
        Capture().store_choices(0, torch.zeros(3, 2, dtype=torch.int64))
    assert hooked == [[[1, 1]] * 3, [[2, 2]] * 3]


def test_steps_whose_time_does_not_follow_experts_have_no_cost() -> None:
    rows = fit_rows([TimedStep(8, experts, 1 / experts, 1 / experts) for experts in range(24, 100)])
    assert rows == [{"level": "fit", "of": part, "steps": 76} for part in ("forward", "step")]


def test_the_packages_figures_stand_beside_the_measured_batches() -> None:
    rows = package_rows([3, 16])
    assert [row["of"] for row in rows] == [
        f"{card}, {what}" for card in ("H100", "H200") for what in ("MoE layers", "step")
    ]
    assert rows[1]["step_p50_ms"] == PACKAGE["H100"][2][16]
    assert rows[0]["fixed_ms"] == pytest.approx(48 * 26 / 1000)


def test_impossible_options_are_refused_in_one_sentence() -> None:
    message = sentence(command("benchmarks.engine.step_cost", device="cpu", batches="1", active="16,32"))
    assert "8 to 8 experts" in message
    assert "--active" in sentence(command("benchmarks.engine.step_cost", device="cpu", active="many"))
    assert "use cpu" in sentence(command("benchmarks.engine.step_cost"))
