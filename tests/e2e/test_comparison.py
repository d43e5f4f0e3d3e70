"""loadgen.compare on real engines: stop, resume, and final state."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

from loadgen.trial import JOURNAL, read_trials
from tests.e2e.service import ADMIN_KEY, ROOT, Service, wait_for

POLICIES = ("shortest-queue", "locality-band:band=0.3")


def compare(service: Service, out: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [
            sys.executable,
            "-m",
            "loadgen.compare",
            f"--host={service.url}",
            f"--policies={','.join(POLICIES)}",
            "--rate=3",
            "--trial-seconds=5",
            "--warm-up-seconds=1",
            "--rounds=1",
            "--max-tokens=12",
            f"--out={out}",
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=ROOT,
        env=os.environ | {"ELDR_ADMIN_KEY": ADMIN_KEY},
    )


def test_a_stopped_comparison_resumes_and_reports(service: Service, tmp_path: Path) -> None:
    service.set_policy("locality-band", band=0.2)
    out = tmp_path / "compare"

    first = compare(service, out)
    wait_for(lambda: (out / JOURNAL).exists() and bool(read_trials(out)), "the first trial is finished", 90)
    first.send_signal(signal.SIGTERM)
    output, _ = first.communicate(timeout=60)
    assert first.returncode == 130, output
    assert not (out / "compare.json").exists()
    assert (service.status()["policy"], service.status()["parameters"]) == ("locality-band", {"band": 0.2})
    (trial,) = read_trials(out)

    second = compare(service, out)
    output, _ = second.communicate(timeout=150)
    assert second.returncode == 0, output
    assert "none failed" in output
    assert trial in read_trials(out)
    assert (service.status()["policy"], service.status()["parameters"]) == ("locality-band", {"band": 0.2})

    result = json.loads((out / "compare.json").read_text())
    assert set(result) == {"name", "commit", "machine", "versions", "seed", "inputs", "rows", "notes"}
    plain, banded = result["rows"]
    assert (plain["policy"], banded["policy"]) == POLICIES
    assert plain["requests"] == banded["requests"] > 0
    for row in result["rows"]:
        assert row["failures"] == 0
        assert 4 <= row["active_experts"] <= 64
        assert row["batch_size"] >= 1
        assert row["tpot_p50_ms_low"] <= row["tpot_p50_ms"] <= row["tpot_p50_ms_high"]
        assert 0 < row["handover_p50_ms"] < row["ttft_p50_ms"]
    assert banded["tpot_p50_ms_baseline"] == "shortest-queue"
    assert "<img" in (out / "report.html").read_text()
    policies = {record["policy"].partition(":")[0] for t in read_trials(out) for record in t.requests}
    assert policies == {"shortest-queue", "locality-band"}
