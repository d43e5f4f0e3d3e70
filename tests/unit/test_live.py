"""A live comparison: its folder, where loadgen.compare accepts only its own beginnings, and its rows."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from traces import synthetic_trace

from benchmarks.rig import live
from eldr_serve.artifacts import RoutingTable
from eldr_serve.client import Client
from eldr_serve.fitting import fit_table
from loadgen.block import Block
from loadgen.figures import rows_of
from loadgen.plan import Folder, order, read_blocks
from loadgen.stats import Slo

URL = "http://127.0.0.1:1"


def test_a_comparison_is_kept_until_its_figures_are_published(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seen: list[bool] = []  # for each comparison: whether it found its own beginnings
    tables: list[bytes] = []

    really = subprocess.run

    def compare(command: list[str], **kwargs: Any) -> subprocess.CompletedProcess[Any]:
        if "loadgen.compare" not in command:
            return really(command, **kwargs)
        options = dict(word.removeprefix("--").split("=", 1) for word in command[3:])
        assert options["host"] == URL
        path = Path(options["out"])
        folder = Folder(path, {"rate": options["rate"]})  # refuses what is not a comparison's
        seen.append((path / "plan.json").exists())
        folder.note({})
        if options["rate"] == "stop":
            return subprocess.CompletedProcess(command, 130)
        (path / "compare.json").write_text(json.dumps({"rate": options["rate"]}))
        return subprocess.CompletedProcess(command, 0)

    def swap(client: Client, table: bytes) -> None:
        assert client.url == URL
        tables.append(table)

    monkeypatch.setattr(live.subprocess, "run", compare)
    monkeypatch.setattr(Client, "swap_table", swap)
    table, _ = fit_table(synthetic_trace(), 2)

    def compared(rate: str) -> dict[str, Any]:
        return live.compared(table, {"rate": rate}, port=1, folder=tmp_path)

    assert live.claimed(tmp_path, {"rate": "2"}) is None  # nothing was measured
    assert live.claimed(tmp_path, {"rate": "4", "folder": tmp_path}) is None
    with pytest.raises(live.BadInput, match="status 130"):
        compared("stop")
    assert live.claimed(tmp_path, {"rate": "4", "folder": tmp_path}) is None
    (tmp_path / "comparison" / "plan.json").unlink()
    assert compared("4") == live.claimed(tmp_path, {"rate": "4", "folder": tmp_path}) == {"rate": "4"}
    with pytest.raises(live.BadInput, match="another rate, users: give the same or remove it"):
        live.claimed(tmp_path, {"rate": "8", "folder": tmp_path, "users": 2})
    live.finish(tmp_path)
    assert live.claimed(tmp_path, {"rate": "8", "users": 2}) is None
    assert live.result_of(tmp_path) is None
    assert compared("8") == {"rate": "8"}
    live.finish(tmp_path)
    assert json.loads((tmp_path / "published" / "compare.json").read_text()) == {"rate": "8"}
    with pytest.raises(live.BadInput):
        compared("stop")
    with pytest.raises(live.BadInput, match="another rate"):
        compared("9")
    assert seen == [False, False, False, False]
    assert len(tables) == 5
    file = tmp_path / "table.safetensors"
    assert tables[-1] == file.read_bytes()
    assert len(RoutingTable.load(file).centroids) == 2


def test_rows_come_by_both_clocks_until_they_are_published(tmp_path: Path) -> None:
    """Two policies alike, one of which met cores at half their speed."""
    shape = {"warm_up_s": 0, "seconds": 100, "slo_ttft_ms": 1e3, "slo_tpot_ms": 1e2, "seed": 0}
    policies = ["random", "marginal-cost"]
    folder = Folder(tmp_path / "comparison", shape)
    folder.note({})
    for step in order(policies, 1, 0):
        slow = step.policy == "marginal-cost"
        requests = [
            {
                "number": n, "due_s": None, "sent_s": float(n), "sent_unix_s": 60.0 * slow + n,
                "ttft_s": 2.0 if slow else 1.0, "tpot_s": 0.2 if slow else 0.1, "itl_s": [],
                "end_s": 12.0 if slow else 6.0, "late_s": None, "handover_s": None,
            }
            for n in range(5)
        ]  # fmt: skip
        engines = {"seconds": 20.0 if slow else 10.0, "batch": 100.0, "steps": 10.0, "active": 50.0}
        folder.save(Block(step.policy, 0, requests, engines), step)
    wall = rows_of(policies, read_blocks(folder.path), warm_up_s=0, seconds=100, slo=Slo(1e3, 1e2), seed=0)
    result = {"inputs": shape | {"policies": policies}, "rows": wall}
    pace = tmp_path / "pace"
    pace.mkdir()
    lines = [json.dumps([t, 1e-3 if t < 50 else 2e-3, 0, 100 * t]) for t in range(101)]
    (pace / "pace_0.jsonl").write_text("\n".join(lines) + "\n")
    rows = {(r["clock"], r["policy"]): r for r in live.by_both_clocks(result, tmp_path)}
    assert len(rows) == 4
    assert rows["wall", "marginal-cost"]["tpot_p50_ms_change_pct"] == pytest.approx(100.0)
    assert rows["wall", "marginal-cost"]["engine_ms_per_token_change_pct"] == pytest.approx(100.0)
    assert rows["even", "marginal-cost"]["tpot_p50_ms_change_pct"] == pytest.approx(0.0, abs=1.0)
    assert rows["even", "marginal-cost"]["engine_ms_per_token_change_pct"] == pytest.approx(0.0, abs=1.0)
    assert rows["even", "random"]["active_experts"] == rows["wall", "random"]["active_experts"] == 5.0
    live.finish(tmp_path)
    assert not pace.exists()
