"""Blocks of finished prompts that no decode engine will read are freed, whenever this becomes known."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.engine.scripts import run_script


@pytest.mark.parametrize(("mode", "port"), [("async", "21875"), ("sync", "21876")])
def test_an_abandoned_prompt_frees_its_blocks(model: Path, tmp_path: Path, mode: str, port: str) -> None:
    out = tmp_path / "report.json"
    run_script("release_script.py", model, out, mode, VLLM_NIXL_SIDE_CHANNEL_PORT=port)
    results = json.loads(out.read_text())
    assert results == {
        "idle": 0,
        "ended": ["client-after"],
        "held": 4,  # 100 tokens in blocks of 32
        "abandoned after its end": 0,
        "abandoned before it came": 0,
        "abandoned while it was computed": 0,
        "abandoned, prolonged by a heartbeat": 0,
        "another was abandoned": 4,
        "without a name": 4,
        # A prompt without a name cannot be found. `oth` and `nameless` were never held.
        "remembered": [0, 2],
    }
