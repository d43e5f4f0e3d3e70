"""The cost of counting experts: the messages that are timed, and the rows."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.engine import capture_overhead
from benchmarks.engine.capture_overhead import messages_with
from eldr_serve.engine.calls import expert_counts_of
from eldr_serve.experts.signature import unpack_counts


def test_each_timed_message_carries_the_counts_to_its_reader() -> None:
    counts = np.random.default_rng(0).integers(0, 300, (3, 8)).astype(np.uint32)
    core_output, reply, place, decode_request = messages_with(counts)()
    assert place.request.expert_counts is not None
    read = [
        expert_counts_of(core_output),
        expert_counts_of(reply.kv_transfer_params),
        place.request.expert_counts,
        unpack_counts(decode_request.expert_counts),
    ]
    for counts_read in read:
        np.testing.assert_array_equal(counts_read, counts)


def test_each_row_has_the_block_size_with_which_it_was_measured(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class Engine:
        def __init__(self, job: dict[str, Any], port: int, stack: Any) -> None:
            assert job["block_size"] == 32

        def prefill(self, prompt: list[int], capture: bool) -> tuple[float, float]:
            return 0.1, 0.01

    monkeypatch.setattr(capture_overhead, "_PrefillProcess", Engine)
    monkeypatch.setattr(capture_overhead, "parts", lambda *_: {"pack": [0.001, 0.002, 0.003]})
    monkeypatch.setattr(capture_overhead, "unwind_on_sigterm", lambda: None)
    capture_overhead.capture_overhead(block_size=48, requests=3, wide_requests=0, out=tmp_path / "out.json")
    result = json.loads((tmp_path / "out.json").read_text())
    sizes = {(row["level"], row["block_size"]) for row in result["rows"]}
    assert sizes == {("part", 48), ("engine", 32)}
    assert "block_size" not in result["inputs"]
