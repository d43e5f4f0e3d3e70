"""Small runs of the serving benchmarks on real processes. Each must end with its rows.

They run first (see conftest.py), since their engines use the NIXL ports of the suite's application.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.service import run

pytestmark = pytest.mark.benchmarks


def rows(tmp_path: Path, command: str) -> list[dict[str, Any]]:
    out = tmp_path / "result.json"
    run("-m", *f"benchmarks.serving.{command} --out {out}".split(), timeout_s=400)
    return json.loads(out.read_text())["rows"]


def test_streams_end_and_leave_no_leases(tmp_path: Path) -> None:
    (row,) = rows(tmp_path, "streams --counts=40 --ways=own-quiet --loads=10@50 --ramp-s=1 --idle-s=2")
    assert (row["requests"], row["failures"], row["leases_left"]) == (40, 0, 0)
    assert row["server_us_per_token"] > 0


def test_the_application_starts_with_all_of_rays_settings_and_idles(tmp_path: Path) -> None:
    (row,) = rows(tmp_path, "ray_idle --settings=all --rounds=1 --idle-s=2 --settle-s=0")
    assert row["idle_pct"] >= row["ingress_pct"] > 0


def test_the_handover_has_its_parts(tmp_path: Path) -> None:
    (row,) = rows(tmp_path, "handover --in-flight=8 --requests=256 --max-tokens=2 --rounds=1")
    assert row["failures"] == 0
    assert 0 < row["step_mean_ms"] < row["engine_mean_ms"] < row["handover_mean_ms"] < row["ttft_mean_ms"]
