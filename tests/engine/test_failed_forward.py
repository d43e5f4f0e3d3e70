"""An engine whose forward pass fails raises the original error and counts nothing of the step."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.engine.scripts import run_script


@pytest.mark.parametrize("after", ["nothing", "a prompt"])
def test_a_failed_forward_raises_its_own_error_and_is_not_counted(
    model: Path, tmp_path: Path, after: str
) -> None:
    out = tmp_path / "report.json"
    run_script("failed_forward_script.py", model, out, after)
    report = json.loads(out.read_text())
    assert report["error"] == "ValueError: this layer has no kernel for that"
    assert report["counted before"] == report["counted after"]
    assert (report["counted before"] > 0) == (after == "a prompt")
