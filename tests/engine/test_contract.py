"""vLLM's engines satisfy the contract of serving and calibration (`engine_contract`)."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.lib.tiny_model import EXPERTS
from eldr_serve.experts.signature import unpack_counts
from tests.engine.scripts import run_script
from tests.support.engine_contract import CHECKS


@pytest.fixture(scope="module")
def report(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    out = tmp_path_factory.mktemp("contract") / "report.json"
    run_script("contract_script.py", model, out)
    return json.loads(out.read_text())


@pytest.mark.parametrize("check", CHECKS)
def test_an_engine_satisfies_the_contract(report: Any, check: str) -> None:
    assert report["broken"][check] == ""


def test_a_calibration_engine_counts_prefill_and_decode_separately(report: Any) -> None:
    assert report["calibration"] == []


def test_counts_match_the_prompt_and_steps_are_reported(
    report: Any, choices: Callable[[list[int]], np.ndarray]
) -> None:
    chosen = (choices(report["ids"])[..., None] == np.arange(EXPERTS)).sum(axis=(0, 2))
    np.testing.assert_array_equal(unpack_counts(report["counts"]), chosen)
    assert report["steps"] > 0
