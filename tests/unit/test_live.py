"""The folder of a live comparison, which loadgen.compare accepts only where it is empty or its own."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import httpx
import pytest
from traces import synthetic_trace

from benchmarks import live
from eldr_serve.artifacts import RoutingTable
from eldr_serve.fitting import fit_table
from loadgen.plan import Folder

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

    def swap(url: str, *, content: bytes, headers: dict[str, str], **_: Any) -> httpx.Response:
        assert url == f"{URL}/eldr/table"
        assert headers["authorization"].startswith("Bearer ")
        tables.append(content)
        return httpx.Response(200, request=httpx.Request("PUT", url))

    monkeypatch.setattr(live.subprocess, "run", compare)
    monkeypatch.setattr(live.httpx, "put", swap)
    table, _ = fit_table(synthetic_trace(), 2)

    def compared(rate: str) -> dict[str, Any]:
        return live.compared(table, {"rate": rate}, port=1, folder=tmp_path)

    assert live.result_of(tmp_path) is None
    with pytest.raises(live.BadInput, match="status 130"):
        compared("stop")
    assert live.result_of(tmp_path) is None
    (tmp_path / "comparison" / "plan.json").unlink()
    assert compared("4") == live.result_of(tmp_path) == {"rate": "4"}
    live.finish(tmp_path)
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
