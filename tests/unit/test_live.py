"""The folder of a live comparison, which loadgen.compare accepts only where it is empty or its own."""

from __future__ import annotations

import json
import subprocess
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from traces import synthetic_trace

from benchmarks import live
from eldr_serve.artifacts import RoutingTable
from eldr_serve.fitting import fit_table
from loadgen.plan import Folder


def test_a_comparison_is_kept_until_its_figures_are_published(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seen: list[bool] = []  # for each comparison: whether it found its own beginnings

    really = subprocess.run

    def compare(command: list[str], **kwargs: Any) -> subprocess.CompletedProcess[Any]:
        if "loadgen.compare" not in command:
            return really(command, **kwargs)
        options = dict(word.removeprefix("--").split("=", 1) for word in command[3:])
        path = Path(options["out"])
        folder = Folder(path, {"rate": options["rate"]})  # refuses what is not a comparison's
        seen.append((path / "plan.json").exists())
        folder.note({})
        if options["rate"] == "stop":
            return subprocess.CompletedProcess(command, 130)
        (path / "compare.json").write_text(json.dumps({"rate": options["rate"]}))
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(live, "local_ray", lambda **_: nullcontext())
    monkeypatch.setattr(live, "wait_ready", lambda *_: None)
    monkeypatch.setattr(live.subprocess, "run", compare)
    monkeypatch.setattr("ray.serve.run", lambda *_, **__: None)
    monkeypatch.setattr("eldr_serve.serving.app.build_app", lambda arguments: None)
    table, _ = fit_table(synthetic_trace(), 2)

    def served(rate: str) -> dict[str, Any]:
        return live.served({}, table, {"rate": rate}, port=1, folder=tmp_path)

    with pytest.raises(live.BadInput, match="status 130"):
        served("stop")
    (tmp_path / "comparison" / "plan.json").unlink()
    assert served("4") == {"rate": "4"}
    # Another workload of the same run was stopped: this one is not measured again.
    assert served("4") == {"rate": "4"}
    assert seen == [False, False]
    live.finish(tmp_path)
    assert served("8") == {"rate": "8"}
    live.finish(tmp_path)
    assert json.loads((tmp_path / "published" / "compare.json").read_text()) == {"rate": "8"}
    with pytest.raises(live.BadInput):
        served("stop")
    with pytest.raises(live.BadInput, match="another rate"):
        served("9")
    assert seen == [False, False, False, False]
    assert len(RoutingTable.load(tmp_path / "table.safetensors").centroids) == 2
