"""The dispatches between simulated nodes, on four real ranks."""

import json
from pathlib import Path

import pytest

from benchmarks.engine import ep_nodes
from benchmarks.lib.captured_routes import CapturedRoutes
from benchmarks.lib.ep.timing import ONCE_A_NODE
from tests.support.in_process import command, sentence
from tests.support.torch_experts import time_layers_of_jobs
from tests.support.traces import synthetic_trace


@pytest.fixture(autouse=True)
def _capture(monkeypatch: pytest.MonkeyPatch) -> None:
    trace = synthetic_trace(num_layers=2, num_experts=64, top_k=4)
    monkeypatch.setattr(ep_nodes, "load_or_capture", lambda *_, **__: CapturedRoutes(trace, []))
    monkeypatch.setattr(ep_nodes, "_run_jobs", time_layers_of_jobs)


@pytest.mark.benchmarks
def test_fewer_bytes_cross_if_a_token_is_sent_once_to_each_node(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    options = {"batch": "8,64", "bandwidth": "100,1", "batches": 4, "rounds": 3, "out": out}
    done = command("benchmarks.engine.ep_nodes", **options)
    assert done.exit_code == 0, done.output
    rows = json.loads(out.read_text())["rows"]
    assert [(row["batch_size"], row["bandwidth_mb_s"]) for row in rows[::2]] == [
        (8, 100),
        (8, 1),
        (64, 100),
        (64, 1),
    ]
    for direct, once in zip(rows[::2], rows[1::2], strict=True):
        assert (direct["dispatch"], once["dispatch"]) == ("all-to-all", ONCE_A_NODE)
        assert once["far_bytes"] < direct["far_bytes"]
        assert once["near_bytes"] > direct["near_bytes"]
        assert once["near_messages"] > direct["near_messages"]
        assert direct["layer_change_pct"] == 0
        assert once["layer_ms"] > once["dispatch_ms"] > 0
    for row in rows:  # the slowest of four ranks sleeps at least as long as their bytes take on average
        assert row["layer_ms"] >= 0.9 * 1e3 * row["far_bytes"] / 4 / (1e6 * row["bandwidth_mb_s"])
    fast, slow = rows[4], rows[6]
    assert [fast[name] for name in ep_nodes.TRAFFIC] == [slow[name] for name in ep_nodes.TRAFFIC]


def test_a_batch_must_divide_by_the_ranks() -> None:
    assert "does not divide by 4 ranks" in sentence(command("benchmarks.engine.ep_nodes", batch="6"))
