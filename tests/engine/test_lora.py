"""Prefill and decode engines with LoRA adapters, against plain vLLM with the merged weights."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from eldr_serve.experts.signature import unpack_counts
from tests.engine.scripts import run_script


def test_prefill_and_decode_answer_with_the_adapter_that_a_request_names(model: Path, tmp_path: Path) -> None:
    run_script("lora_script.py", model, tmp_path, RAY_USAGE_STATS_ENABLED="0")
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["first"]["ids"] == report["first"]["alone"]
    assert len({tuple(answer["ids"]) for answer in report.values()}) == 3
    base, *others = (unpack_counts(answer["counts"]) for answer in report.values())
    for counts in others:  # counts of the prompt as the adapter routes it
        assert counts.sum() == base.sum()
        assert not np.array_equal(counts, base)
