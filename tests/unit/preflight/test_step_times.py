"""Expected decode steps in `eldr check`."""

from __future__ import annotations

import io
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from eldr_serve.preflight.check import CheckOutcome
from eldr_serve.preflight.machine import Gpu, gpu_of
from eldr_serve.preflight.node_assignment import NodeAssignment
from eldr_serve.preflight.report import as_json, show
from eldr_serve.preflight.step_times import step_times
from tests.unit.gpu_cost.fake_kernels import CONFIGS

H100 = gpu_of("H100")


def engines(role: str = "decode", model: str = "acme/Moe", **arguments: Any) -> Any:
    spec = SimpleNamespace(arguments=lambda: arguments, model_source=model)
    return SimpleNamespace(role=role, spec=spec, model_config=json.dumps(CONFIGS["acme/Moe"]))


@pytest.mark.usefixtures("kernels")
def test_an_engines_own_config_is_priced_with_its_parallel_sizes() -> None:
    alone = step_times(engines(model="store/of-our-own"), H100)
    assert [step.requests for step in alone.steps] == [1, 8, 32]
    spread = step_times(engines(tensor_parallel_size=4, enable_expert_parallel=True), H100)
    assert spread.steps[2].seconds < alone.steps[2].seconds  # the slowest of four ranks has fewer experts
    assert "placement saves at most" in alone.describe("decode")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (engines(pipeline_parallel_size=2), "there are no kernel times for such engines"),
        (engines(quantization="awq"), "there are no kernel times for such engines"),
        (engines(quantization="fp8"), "its experts were not measured"),
        (engines(tensor_parallel_size=3), "should be divisible"),
    ],
)
@pytest.mark.usefixtures("kernels")
def test_an_engine_that_the_package_does_not_know_has_no_expected_step(given: Any, words: str) -> None:
    times = step_times(given, H100)
    assert not times.steps
    assert words in times.describe("decode")


@pytest.mark.usefixtures("kernels")
def test_a_gpu_that_was_not_measured_has_no_expected_step() -> None:
    assert step_times(engines(), Gpu("T4", 15.0, (7, 5))).steps == ()


@pytest.mark.usefixtures("no_kernels")
def test_without_the_package_there_is_only_a_hint() -> None:
    assert step_times(engines(), H100).describe("decode").endswith("==0.12.0` shows it")
    assert step_times(engines(), None) is None  # there is no hint for a CPU
    assert step_times(engines("prefill"), H100) is None


@pytest.mark.usefixtures("kernels")
def test_the_report_has_the_expected_steps_in_text_and_json() -> None:
    times = step_times(engines(), H100)
    checked = CheckOutcome(Path("a.yaml"), None, NodeAssignment([], {}, {}), [], [], {"decode": times})
    text = io.StringIO()
    show(checked, Console(file=text))
    assert times.describe("decode") in text.getvalue()
    (expected_step,) = as_json(checked)["expected_decode_steps"].values()
    assert [step["requests"] for step in expected_step] == [1, 8, 32]
    assert 0 < expected_step[1]["most_saved"] < 1
