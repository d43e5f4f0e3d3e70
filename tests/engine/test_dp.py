"""Data-parallel ranks with expert parallelism on CPUs give the answers and counts of one process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.lib.tiny_model import LAYERS, TOP_K
from tests.engine.dp_transfer_script import LENGTH, RANKS
from tests.engine.scripts import run_script

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def alone(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a file with the answers and counts of one process."""
    answers = tmp_path_factory.mktemp("alone") / "alone.json"
    run_script("dp_script.py", model, "alone", answers)
    return answers


def test_data_parallel_ranks_answer_like_one_process(model: Path, alone: Path) -> None:
    for ranks in (2, 4):
        run_script("dp_script.py", model, ranks, alone, ELDR_EXPERT_PARALLEL="1")


def test_ranks_that_gather_before_top_k_answer_like_one_process(model: Path, alone: Path) -> None:
    run_script("dp_script.py", model, 2, alone, "before-top-k", ELDR_EXPERT_PARALLEL="1")


def test_every_rank_reads_prompts_from_every_rank(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    run_script("dp_transfer_script.py", model, out, ELDR_EXPERT_PARALLEL="1")
    pairs = json.loads(out.read_text())
    assert len(pairs) == RANKS * (RANKS + 1)  # the last decode rank of each is vLLM's choice
    for pair in pairs:
        assert pair["pulled"] == pair["computed"]
        assert pair["counted"] == LENGTH * LAYERS * TOP_K
        assert pair["engine"].endswith(f"_dp{pair['rank']}")
    ports = {pair["rank"]: pair["port"] for pair in pairs}
    assert ports[1] == ports[0] + 1
