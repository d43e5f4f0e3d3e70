"""Refused real engines: the process ends with one sentence that says what to change."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks.lib.families import FAMILIES, Family
from tests.engine.scripts import run_script

DENSE = Family("Qwen3", {})


@pytest.mark.parametrize(
    ("family", "role", "version", "sentence"),
    [
        (
            DENSE,
            "calibrate",
            "",
            "no MoE layer was found .*: name a model with experts, or serve this one with vLLM alone",
        ),
        (FAMILIES["ERNIE-4.5"], "calibrate", "", "has a correction bias, .*; serve this model on GPUs"),
        (
            FAMILIES["Mixtral"],
            "calibrate",
            "0.33.0",
            r"vLLM 0\.33\.0 is not supported.*pip install vllm==0\.32\.0",
        ),
        (
            FAMILIES["LFM2-MoE"],
            "prefill",
            "",
            "NIXL cannot transfer .*SHORT_CONV.*; leave prefill_config out: whole replicas transfer nothing",
        ),
    ],
    ids=["dense", "ERNIE-4.5", "another vLLM", "states that NIXL cannot transfer"],
)
def test_an_engine_that_cannot_count_does_not_start(
    tmp_path: Path, family: Family, role: str, version: str, sentence: str
) -> None:
    model = family.make(tmp_path / "model")
    with pytest.raises(AssertionError) as ended:
        run_script("refused_script.py", model, 21891, role, version)
    lines = str(ended.value).strip().splitlines()
    errors = [line for line in lines if "UnsupportedEngineError: " in line]
    assert errors, lines[-5:]
    assert re.search(sentence, errors[-1])
