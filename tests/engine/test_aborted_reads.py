"""Requests aborted while a decode engine waits for a prompt's blocks release the blocks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.engine.scripts import run_script


@pytest.mark.parametrize("steps", [0, 1], ids=["before the read", "during the read"])
def test_the_engines_free_the_blocks_between_themselves(model: Path, tmp_path: Path, steps: int) -> None:
    """The caller must not free the blocks before the read is over, or NIXL reports invalid blocks."""
    out = tmp_path / "found.json"
    run_script("aborted_read_script.py", model, out, steps, "leaves them")
    assert json.loads(out.read_text()) == {"said": 0, "held": 0, "decode usage": 0.0, "wrong": 0}


def test_reading_blocks_that_were_freed_and_overwritten_causes_no_wrong_text(
    model: Path, tmp_path: Path
) -> None:
    """The blocks read by an aborted request do not enter a prefix cache."""
    out = tmp_path / "found.json"
    run_script("aborted_read_script.py", model, out, 1, "frees them")
    found = json.loads(out.read_text())
    assert found.pop("said") > 0
    assert found == {"held": 0, "decode usage": 0.0, "wrong": 0}
