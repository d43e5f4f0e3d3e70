"""CPU features can be hidden from torch and vLLM, and tests report the features that they see."""

import json
import os

import pytest

from tests.support import cpu_features
from tests.support.processes import python

ASKED = "import json, torch; print(json.dumps({k: f() for k, f in vars(torch.cpu).items() if '_is_' in k}))"


def test_a_process_sees_no_feature_above_the_selected_one() -> None:
    features = json.loads(python("-c", ASKED, **cpu_features.limited_to("avx2", os.environ)).stdout)
    hidden = {name for name in features if "avx512" in name or "amx" in name}
    assert hidden == {f"_is_{name}_supported" for name in ("amx_fp16", "amx_tile", "avx512_bf16", "avx512")}
    assert not any(features[name] for name in hidden)


def test_the_existing_path_is_kept() -> None:
    folders = cpu_features.limited_to("avx512", {"PYTHONPATH": "there"})["PYTHONPATH"].split(os.pathsep)
    assert folders == [str(cpu_features.MASK), "there"]


def test_a_feature_that_cannot_be_selected_is_refused() -> None:
    with pytest.raises(pytest.UsageError, match=r"ELDR_CPU must be one of avx2, avx512, .*, got 'amx'"):
        cpu_features.limited_to("amx", {})


def test_tests_report_the_features_that_they_see(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = {"model name": "A CPU", "flags": "fpu avx2 avx512f avx512vl avx512bw avx512dq avx512_bf16"}
    monkeypatch.setattr(cpu_features, "_cpuinfo", lambda: cpu)
    monkeypatch.delenv(cpu_features.CPU_ENV, raising=False)
    assert cpu_features.description().endswith(" x A CPU, avx2 avx512 avx512_bf16")
    monkeypatch.setenv(cpu_features.CPU_ENV, "avx512")
    assert cpu_features.description().endswith(" x A CPU, avx2 avx512, others hidden by ELDR_CPU")
