"""The commit, the machine and the notes in a result."""

import os
import subprocess
from pathlib import Path

import pytest

from loadgen.results import _commit, column_notes, environment


def test_a_result_marks_uncommitted_code(tmp_path: Path) -> None:
    def git(*arguments: str) -> str:
        command = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b", *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    assert _commit(tmp_path) == "unknown"
    git("init")
    (tmp_path / "code.py").write_text("1\n")
    git("add", ".")
    git("commit", "--message", "first")
    commit = git("rev-parse", "--short", "HEAD")
    (tmp_path / "benchmarks/results").mkdir(parents=True)
    (tmp_path / "benchmarks/results/a.json").write_text("{}")  # a result of the same run
    assert _commit(tmp_path) == commit
    (tmp_path / "code.py").write_text("2\n")
    assert _commit(tmp_path) == f"{commit}+"


def test_a_machine_lists_its_gpus_and_their_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\nprintf 'NVIDIA H100 80GB HBM3, 580.1\\nNVIDIA H200, 580.1\\n'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    machine = environment()["machine"]
    assert (machine["gpu"], machine["driver"]) == ("NVIDIA H100 80GB HBM3, NVIDIA H200", "580.1")
    program.write_text("#!/bin/sh\nexit 9\n")
    assert "gpu" not in environment()["machine"]


def test_notes_have_a_line_for_each_column() -> None:
    notes = column_notes("One engine.", {"step_ms": "Time of a step.", "paper_pct": "The paper's change."})
    assert notes == "One engine.\n- step_ms: Time of a step.\n- paper_pct: The paper's change."
