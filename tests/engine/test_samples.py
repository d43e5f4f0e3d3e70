"""Samples of served requests equal calibration counts and the choices of the Hugging Face model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.lib.tiny_model import EXPERTS
from eldr_serve.experts.signature import unpack_counts
from tests.engine.samples_script import TOKENS, prompts
from tests.engine.scripts import run_script

RUNS = {"decode": ("decode", 30), "whole": ("whole", 30), "whole, v2": ("whole", 10)}


@pytest.fixture(scope="module", params=["decode", "whole", pytest.param("whole, v2", marks=pytest.mark.long)])
def run(
    request: pytest.FixtureRequest, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[int, dict[str, Any]]:
    """Run the script, and return the number of served requests and the results."""
    out = tmp_path_factory.mktemp("samples") / "found.json"
    role, num_requests = RUNS[request.param]
    run_script("samples_script.py", model, out, role, num_requests, v2=request.param.endswith("v2"))
    return num_requests, json.loads(out.read_text())


def test_each_finished_sampled_request_gives_one_sample(run: tuple[int, dict[str, Any]]) -> None:
    num_requests, report = run
    expected = {f"{number}" for number in range(num_requests) if number % 4 != 3 and number % 5 != 4}
    assert sorted(sample["id"] for sample in report["samples"]) == sorted(expected)
    for sample in report["samples"]:
        assert sample["prompt"] == prompts(num_requests)[int(sample["id"])]
        assert sample["domain"] == "d"


def test_some_requests_were_preempted(run: tuple[int, dict[str, Any]]) -> None:
    assert run[1]["preemptions"] > 0


def test_counts_equal_those_of_a_calibration(run: tuple[int, dict[str, Any]]) -> None:
    _, results = run
    for sample, calibrated in zip(results["samples"], results["calibrated"], strict=True):
        assert sample["steps"] == calibrated["eldr_decode_steps"] == TOKENS - 1
        assert sample["prefill"] == calibrated["eldr_prefill"]
        assert sample["decode"] == calibrated["eldr_decode"]


def test_counts_equal_an_uncached_recomputation(
    run: tuple[int, dict[str, Any]], choices: Callable[[list[int]], np.ndarray]
) -> None:
    _, results = run
    for sample in results["samples"]:
        prompt = sample["prompt"]
        chosen = choices(prompt + sample["generated"])[..., None] == np.arange(EXPERTS)
        np.testing.assert_array_equal(
            unpack_counts(sample["prefill"]), chosen[: len(prompt)].sum(axis=(0, 2))
        )
        np.testing.assert_array_equal(
            unpack_counts(sample["decode"]), chosen[len(prompt) : -1].sum(axis=(0, 2))
        )
