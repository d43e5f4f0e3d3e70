"""A live comparison: its folder, which a run with other options cannot resume, and its rows."""

import json
import subprocess
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from benchmarks.lib import live
from eldr_serve.commands.client import OperatorClient
from eldr_serve.errors import UserInputError
from eldr_serve.experts.fitting.table import fit_table
from eldr_serve.experts.routing_table import RoutingTable
from loadgen.figures import policy_rows
from loadgen.journal import Journal
from loadgen.statistics import LatencyObjective
from loadgen.trial import JOURNAL, RESTORE, Trial, read_trials, schedule_trials
from tests.support.traces import synthetic_trace

URL = "http://127.0.0.1:1"


def test_a_comparison_is_kept_until_its_figures_are_published(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    tables: list[bytes] = []
    run = subprocess.run

    def compare(command: list[str], **kwargs: Any) -> subprocess.CompletedProcess[Any]:
        if "loadgen.compare" not in command:
            return run(command, **kwargs)
        options = dict(word.removeprefix("--").split("=", 1) for word in command[3:])
        assert options["host"] == URL
        path = Path(options["out"])
        Journal(path / JOURNAL, {"rate": options["rate"]}).put(RESTORE, None)
        if options["rate"] == "stop":
            return subprocess.CompletedProcess(command, 130)
        (path / "compare.json").write_text(json.dumps({"rate": options["rate"]}))
        return subprocess.CompletedProcess(command, 0)

    def swap(client: OperatorClient, table: bytes) -> None:
        assert client.url == URL
        tables.append(table)

    monkeypatch.setattr(live.subprocess, "run", compare)
    monkeypatch.setattr(OperatorClient, "swap_table", swap)
    table, _ = fit_table(synthetic_trace(), 2)
    file = tmp_path / "table.safetensors"

    def comparison_at(rate: str) -> live.LiveComparison:
        return live.LiveComparison(tmp_path, {"rate": rate, "folder": tmp_path})

    assert comparison_at("2").result is None  # nothing was measured
    with pytest.raises(UserInputError, match="status 130"):
        comparison_at("4").measure(table, {"rate": "stop"}, port=1)
    assert comparison_at("4").result is None
    with pytest.raises(UserInputError, match=r"different settings \(rate\)"):
        comparison_at("8")
    (tmp_path / "comparison" / JOURNAL).unlink()
    comparison_at("4").measure(table, {"rate": "4"}, port=1)
    assert comparison_at("4").result == {"rate": "4"}
    with monkeypatch.context() as patches:
        patches.setattr("shutil.rmtree", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            comparison_at("4").finish()
    assert comparison_at("8").result is None  # no journal is left without what `rows` reads
    comparison_at("8").measure(table, {"rate": "8"}, port=1)
    assert json.loads((tmp_path / "published" / "compare.json").read_text()) == {"rate": "4"}
    comparison_at("8").finish()
    assert comparison_at("2").result is None
    assert json.loads((tmp_path / "published" / "compare.json").read_text()) == {"rate": "8"}
    assert len(tables) == 3
    assert tables[-1] == file.read_bytes()
    assert len(RoutingTable.load(file).centroids) == 2


def test_rows_exist_for_both_clocks_until_they_are_published(tmp_path: Path) -> None:
    """Compare two equal policies, one of which ran on cores at half speed."""
    shape = {"warm_up_s": 0, "seconds": 100, "slo_ttft_ms": 1e3, "slo_tpot_ms": 1e2, "seed": 0}
    policies = ["random", "marginal-cost"]
    journal = Journal(tmp_path / "comparison" / JOURNAL, shape)
    for step in schedule_trials(policies, 1, 0):
        slow = step.policy == "marginal-cost"
        times = {k: v * (1 + slow) for k, v in (("ttft_s", 1.0), ("tpot_s", 0.1), ("end_s", 6.0))}
        times |= {"itl_s": [], "due_s": None, "late_s": None, "handover_s": None}
        requests = [
            times | {"number": n, "sent_s": float(n), "sent_unix_s": 60.0 * slow + n} for n in range(5)
        ]
        engines = {"seconds": 10.0 * (1 + slow), "requests": 100.0, "steps": 10.0, "active_experts": 50.0}
        engines["token_seconds"] = 12 * engines["seconds"]
        journal.put(step.key, asdict(Trial(step.policy, 0, requests, engines)))
    trials = read_trials(tmp_path / "comparison")
    wall = policy_rows(
        policies, trials, warm_up_s=0, seconds=100, objective=LatencyObjective(1e3, 1e2), seed=0
    )
    asked = Journal(tmp_path / "asked.jsonl", {})
    asked.put("result", {"inputs": shape | {"policies": policies}, "rows": wall})
    cpu_speed = tmp_path / "cpu_speed"
    cpu_speed.mkdir()
    lines = [json.dumps([t, 1e-3 if t < 50 else 2e-3, 0, 100 * t]) for t in range(101)]
    (cpu_speed / "cpu_speed_0.jsonl").write_text("\n".join(lines) + "\n")
    rows = {(r["clock"], r["policy"]): r for r in live.LiveComparison(tmp_path, {}).rows()}
    assert len(rows) == 4
    for clock, change in (("wall", 100.0), ("normalised", 0.0)):
        row = rows[clock, "marginal-cost"]
        names = ("tpot_p50_ms", "engine_ms_per_token", "step_ms_per_token")
        changes = [row[f"{name}_change_pct"] for name in names]
        assert changes == pytest.approx([change] * 3, abs=1.0)
        assert rows[clock, "random"]["active_experts"] == 5.0
    live.LiveComparison(tmp_path, {}).finish()
    assert not cpu_speed.exists()
