"""Blocks of finished prompts that no decode engine will read are freed, whenever that became known."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from scripts import run_script


@pytest.mark.parametrize(("mode", "port"), [("async", "21875"), ("sync", "21876")])
def test_a_prompt_that_is_given_up_gives_its_blocks_back(
    model: Path, tmp_path: Path, mode: str, port: str
) -> None:
    out = tmp_path / "report.json"
    run_script("release_script.py", model, out, mode, VLLM_NIXL_SIDE_CHANNEL_PORT=port)
    found = json.loads(out.read_text())
    assert found == {
        "idle": 0,
        "ended": ["client-after"],
        "held": 4,  # 100 tokens in blocks of 32
        "abandoned after its end": 0,
        "abandoned before it came": 0,
        "abandoned while it was computed": 0,
        "abandoned, prolonged by a heartbeat": 0,
        "another was abandoned": 4,
        "without a name": 4,
        # The nameless prompt is not known by name; `oth` and `nameless` were never held.
        "remembered": [0, 2],
    }
