"""After a transfer of a KV cache with several groups, a decode engine writes the same text as one alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.lib.families import FAMILIES
from tests.engine.scripts import run_script
from tests.engine.transfer_script import TOKENS

# Choices of a token: layers x top-k.
CHOICES = {"GPT-OSS": 4 * 4, "Gemma-4": 6 * 2, "Llama-4": 4, "Qwen3-Next": 4 * 4}
RECURRENT = {"Qwen3-Next"}  # NIXL leaves a prompt's last token to the decode engine


@pytest.mark.families
@pytest.mark.parametrize("family", CHOICES)
def test_a_decode_engine_writes_the_same_text_as_one_engine(tmp_path: Path, family: str) -> None:
    model, out = FAMILIES[family].make(tmp_path / "model"), tmp_path / "found.json"
    arguments = {
        "model": str(model),
        "dtype": FAMILIES[family].engine["dtype"],
        "max_model_len": 512,
        "num_gpu_blocks_override": 160,
    }
    run_script("transfer_script.py", json.dumps(arguments), out)
    for length, transfer in zip(TOKENS, json.loads(out.read_text()), strict=True):
        assert transfer["pulled"] == transfer["computed"]
        assert transfer["counted"] == (length - (family in RECURRENT)) * CHOICES[family]
        assert transfer["answered_prompt"]
        assert len(transfer["groups"]) > 1
