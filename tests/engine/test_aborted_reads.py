"""Requests that are aborted while a decode engine reads a prompt's blocks release the blocks."""

from __future__ import annotations

import json
from pathlib import Path

from tests.engine.aborted_read_script import Blocks
from tests.engine.scripts import run_script

NOTHING_WRONG = {"held_prompts": 0, "decode_kv_usage": 0.0, "wrong_answers": 0}


def test_the_engines_free_the_blocks_between_themselves(model: Path, tmp_path: Path) -> None:
    """The caller must not free the blocks before the read is over, or NIXL reports invalid blocks."""
    out = tmp_path / "results.json"
    run_script("aborted_read_script.py", model, out, Blocks.LEFT, 1, 0)
    during_the_read, before_it = json.loads(out.read_text())
    assert during_the_read == NOTHING_WRONG | {"invalid_block_warnings": 0}
    assert before_it == NOTHING_WRONG | {"invalid_block_warnings": 0}


def test_reading_blocks_that_were_freed_and_overwritten_causes_no_wrong_text(
    model: Path, tmp_path: Path
) -> None:
    """The blocks read by an aborted request do not enter a prefix cache."""
    out = tmp_path / "results.json"
    run_script("aborted_read_script.py", model, out, Blocks.OVERWRITTEN, 1)
    (results,) = json.loads(out.read_text())
    assert results.pop("invalid_block_warnings") > 0
    assert results == NOTHING_WRONG
