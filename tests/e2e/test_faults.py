"""A short run of `python -m tests.faults chaos` on a separate application."""

import json
from pathlib import Path

import pytest

from tests.support.processes import python

FAULTS = "kill decode,kill router,stop decode,kill ingress,change policy,swap table"
IN_FRONT = "kill proxy,kill ingress,kill controller,kill router,swap table"


@pytest.mark.faults
@pytest.mark.parametrize(("proxies", "faults"), [(1, FAULTS), (2, IN_FRONT)])
def test_processes_die_in_turn_and_no_request_is_lost(proxies: int, faults: str, tmp_path: Path) -> None:
    out = tmp_path / "faults.json"
    options = {"seconds": 100, "every": 15, "in-flight": 6, "faults": faults, "port": 8311, "out": out}
    options |= {"proxies": proxies}
    words = ["-m", "tests.faults", "chaos", *(f"--{k}={v}" for k, v in options.items())]
    done = python(*words, timeout_s=600)
    assert out.exists(), done.stderr[-3000:]
    rows = {row["fault"]: row for row in json.loads(out.read_text())["rows"]}
    assert rows["all"]["requests"] > 50
    assert rows["all"]["times"] == sum(row["times"] for row in rows.values()) - rows["all"]["times"]
    assert rows["all"]["times"] >= 5
    assert rows["all"]["proxies"] == proxies
    assert done.returncode == 0, done.stdout
