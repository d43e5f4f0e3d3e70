"""The offline commands on good and on bad input. No engine is started."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from eldr_serve import ArtifactError, ConfigurationError, PolicyError, RoutingTable, ServiceError
from eldr_serve.errors import ServiceFailedError
from eldr_serve.experts.signature import TRANSFORMS
from tests.fuzz.__main__ import hostile
from tests.support.full_disk import full_disk
from tests.support.in_process import command, sentence
from tests.support.processes import python
from tests.support.shipped import ROOT
from tests.support.traces import synthetic_trace


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    synthetic_trace().save(tmp_path / "trace.safetensors")
    return tmp_path / "trace.safetensors"


def test_fit_writes_table_report_and_plot(trace: Path) -> None:
    out, report, plot = (trace.with_name(name) for name in ("table.safetensors", "report.json", "plot.png"))
    options = {"trace": trace, "workers": 3, "out": out, "report": report, "plot": plot}
    # Run it as a user would; the other tests call commands in this process.
    done = python("-m", "offline.fit", *(f"--{name}={value}" for name, value in options.items()))
    assert done.returncode == 0, done.stderr
    table, report_of_fit = RoutingTable.load(out), json.loads(report.read_text())
    assert table.cluster_sizes.tolist() == report_of_fit["cluster_sizes"] == [20, 20, 20]
    assert sorted(table.domains) == ["d0", "d1", "d2"]
    assert report_of_fit["rho"] >= report_of_fit["rho_all_layers"] - 0.02
    assert set(report_of_fit["transforms"]) == set(TRANSFORMS)
    assert plot.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    "words",
    [
        "offline.fit --trace nowhere --workers 3 --out {out}",
        "offline.fit --trace {trace} --workers 61 --out {out}",
        "offline.fit --trace {trace} --workers 3 --out {out} --transform gate-prob",
        "offline.fit --trace {trace} --workers 3 --out nowhere/table",
        "offline.fit --trace {trace} --workers 3 --out {out} --report nowhere/report",
        "offline.fit --trace README.md --workers 3 --out {out}",
        "offline.refit --trace {trace}",
        "offline.refit --trace {trace} --out {out}",
        "offline.refit --trace nowhere --workers 3 --out {out}",
        "loadgen.compare --host http://127.0.0.1:9 --policies random --rate 1 --out {out}",
        "offline.calibrate --deployment nowhere --prompts examples/demo_model/prompts --out {out}",
        "offline.calibrate --deployment Makefile --prompts examples/demo_model/prompts --out {out}",
        "offline.calibrate --deployment deployments/cpu_demo.yaml --prompts nowhere --out {out}",
        "offline.calibrate --deployment deployments/cpu_demo.yaml --prompts Makefile --out {out}",
    ],
)
def test_bad_input_gets_status_2_one_sentence_and_no_file(words: str, trace: Path) -> None:
    out = trace.with_name("table.safetensors")
    assert sentence(command(*words.format(trace=trace, out=out).split()))
    assert not out.exists()
    assert {p.name for p in trace.parent.iterdir()} == {"trace.safetensors"}


@pytest.mark.parametrize("which", ["fit", "fit_predictor"])
def test_a_full_disk_is_reported_and_old_files_stay(which: str, trace: Path) -> None:
    options: dict[str, object] = {"trace": trace, "out": trace.with_name("artifact.safetensors")}
    options |= {"workers": 3} if which == "fit" else {}
    assert command(f"offline.{which}", **options).exit_code == 0
    before = {path.name: path.read_bytes() for path in trace.parent.iterdir()}
    with full_disk():
        message = sentence(command(f"offline.{which}", **options, seed=1))
    assert "File too large" in message
    assert {path.name: path.read_bytes() for path in trace.parent.iterdir()} == before


@pytest.mark.parametrize(
    ("error", "is_the_users"),
    [
        (ArtifactError("wrong"), True),
        (ConfigurationError("wrong"), True),
        (PolicyError("wrong"), True),
        (ServiceError("wrong"), True),
        (FileNotFoundError(2, "wrong", "nowhere"), True),
        (ValueError("wrong"), False),
        (KeyError("wrong"), False),
        (np.linalg.LinAlgError("wrong"), False),
    ],
)
def test_a_fault_of_the_program_ends_with_a_traceback(error: Exception, is_the_users: bool) -> None:
    def fail() -> None:
        raise error

    done = command(fail)
    if is_the_users:
        assert "wrong" in sentence(done)
    else:
        assert done.exception is error
        assert done.exit_code == 1


def test_a_failure_of_the_service_ends_with_status_1_and_one_sentence() -> None:
    def fail() -> None:
        raise ServiceFailedError("HTTP 503:\nno engine")

    done = command(fail)
    assert (done.exit_code, done.stderr) == (1, "fail: HTTP 503: no engine\n")


NAMES = ("fit", "fit_predictor", "refit", "calibrate", "demo", "place", "routes")
MODULES = [f"offline.{name}" for name in NAMES]


@pytest.mark.parametrize("module", [*MODULES, "loadgen.compare", hostile])
def test_help_shows_units_and_defaults(module: Any) -> None:
    done = command(module, "--help")
    assert done.exit_code == 0
    assert "--seed" in done.stdout
    assert "default" in done.stdout


def test_a_dry_run_of_calibrate_prints_its_plan() -> None:
    done = command(
        "offline.calibrate",
        "--deployment=deployments/cpu_demo.yaml",
        "--prompts=examples/demo_model/prompts",
        "--out=nothing.safetensors",
        "--limit=20",
        "--dry-run",
    )
    assert done.exit_code == 0, done.stderr
    assert "20 prompts" in done.stdout
    assert not (ROOT / "nothing.safetensors").exists()
