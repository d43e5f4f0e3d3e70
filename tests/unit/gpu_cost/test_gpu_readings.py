"""Readings of the package of kernel times, and sentences for unknown models and GPUs."""

from __future__ import annotations

import json
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from eldr_serve.errors import UserInputError
from eldr_serve.gpu_cost import kernel_times
from eldr_serve.gpu_cost.fitting import fit
from eldr_serve.gpu_cost.readings import Readings, Setting
from tests.support.shipped import ROOT
from tests.unit.gpu_cost.fake_kernels import CONFIGS, TERMS

MOE = Setting("acme/Moe", "h100_sxm")


@pytest.mark.parametrize("parallel", [{}, {"tp": 4}, {"tp": 4, "ep": 4}, {"tp": 4, "ep": 2}])
@pytest.mark.usefixtures("kernels")
def test_the_times_of_linear_kernels_are_found_exactly(parallel: dict[str, int]) -> None:
    readings = kernel_times.read(replace(MOE, **parallel))
    assert readings.shape.layers == 10
    assert len(readings.steps) == 2 * len(kernel_times.BATCHES) * len(kernel_times.CONTEXTS)
    result = fit(readings)
    assert result.cost.per_expert_s == pytest.approx(TERMS.per_expert_s, rel=1e-4)
    batch = np.arange(1, 99)
    assert result.cost.seconds(batch, 50, 9, 3) == pytest.approx(TERMS.seconds(batch, 50, 9, 3), rel=1e-4)
    assert abs(result.errors).max() < 1e-5
    assert abs(result.prompt_errors).max() < 1e-5


@pytest.mark.usefixtures("kernels")
def test_a_config_in_a_file_or_folder_is_as_good_as_a_name(tmp_path: Path) -> None:
    path = tmp_path / "moe.json"
    path.write_text(json.dumps(CONFIGS["acme/Moe"]))
    (tmp_path / "config.json").write_text(path.read_text())
    by_name = kernel_times.read(MOE)
    for model in (str(path), str(tmp_path)):
        assert kernel_times.read(replace(MOE, model=model)).steps == by_name.steps
    assert kernel_times.read(replace(MOE, model="a/name"), config=path.read_text()).steps == by_name.steps
    # Only the config of this model is there.
    assert kernel_times.read(replace(MOE, model="acme/Moe-Large")).shape.layers == 20


@pytest.mark.usefixtures("kernels")
def test_gpus_and_models_with_experts_are_listed() -> None:
    assert kernel_times.is_installed()
    assert kernel_times.list_gpus() == ["h100_sxm", "h200_sxm"]
    assert kernel_times.list_models() == ["acme/Moe", "acme/Moe-Large"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model": "acme/Mow"}, "--model is 'acme/Mow': .* did you mean 'acme/Moe'"),
        ({"model": "acme/Dense"}, "acme/Dense has no MoE layers"),
        ({"gpu": "h100"}, "--gpu is 'h100', which is unknown; choose one of h100_sxm, h200_sxm"),
        ({"dtype": "int3"}, "--dtype is 'int3', which is unknown; choose one of bf16, fp8"),
        ({"dtype": "mxfp4"}, "in mxfp4 on h100_sxm, .* its experts were not measured with such weights"),
        ({"dtype": "fp8"}, "its experts were not measured"),
        ({"dtype": "nvfp4"}, "this GPU does not compute with such weights"),
        ({"tp": 3}, "heads 8 should be divisible by tp_size 3"),
        ({"tp": 4, "ep": 3}, r"--ep must be 1 or a divisor of --tp \(4\), got 3"),
    ],
)
@pytest.mark.usefixtures("kernels")
def test_what_the_package_does_not_know_is_refused_in_one_sentence(
    changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(UserInputError, match=words):
        kernel_times.read(replace(MOE, **changes))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"num_experts": 32', "is not a model's config.json"),
        ("[]", "is not a model's config.json"),
        ('{"num_experts": 32}', "cannot read its config.json"),
        (json.dumps(CONFIGS["acme/Moe"] | {"two_kinds": True}), "MoE layers of 2 kinds"),
        (
            '{"architecture": "New"}',
            "on h100_sxm, TP 1, EP 1 has no measured kernel times: .* New is not supported$",
        ),
    ],
)
@pytest.mark.usefixtures("kernels")
def test_a_config_without_measured_kernel_times_is_refused(text: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(UserInputError, match=words):
        kernel_times.read(replace(MOE, model=str(path)))


@pytest.mark.usefixtures("no_kernels")
def test_without_the_package_the_sentence_names_the_pip_command() -> None:
    assert not kernel_times.is_installed()
    with pytest.raises(UserInputError, match=f"aiconfigurator-core: pip install {kernel_times.REQUIREMENT}"):
        kernel_times.read(MOE)


def test_the_pip_command_installs_the_version_of_the_extra() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["optional-dependencies"]["cost"] == [kernel_times.REQUIREMENT]


@pytest.mark.usefixtures("kernels")
def test_readings_survive_json() -> None:
    readings = kernel_times.read(MOE, [1, 2], [512])
    assert Readings.from_json(readings.as_json()) == readings
