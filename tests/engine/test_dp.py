"""Data-parallel ranks with expert parallelism on CPUs give the answers and counts of one process."""

from __future__ import annotations

import json
from pathlib import Path

from tests.engine.dp_transfer_script import LENGTH, RANKS
from tests.engine.scripts import run_script
from tests.support.tiny_model import LAYERS, TOP_K


def test_data_parallel_ranks_answer_like_one_process(model: Path, tmp_path: Path) -> None:
    expected = tmp_path / "alone.json"
    run_script("dp_script.py", model, "alone", expected)
    for ranks in (2, 4):
        run_script("dp_script.py", model, ranks, expected, ELDR_EXPERT_PARALLEL="1")


def test_every_rank_reads_prompts_from_every_rank(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    run_script("dp_transfer_script.py", model, out, ELDR_EXPERT_PARALLEL="1")
    pairs = json.loads(out.read_text())
    assert len(pairs) == RANKS**2
    for pair in pairs:
        assert pair["pulled"] == pair["computed"]
        assert pair["counted"] == LENGTH * LAYERS * TOP_K
        assert pair["engine"].endswith(f"_dp{pair['rank']}")
    ports = {pair["rank"]: pair["port"] for pair in pairs}
    assert ports[1] == ports[0] + 1
