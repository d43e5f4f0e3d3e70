"""What a result says of the code that made it."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tools.results import _commit


def test_a_result_says_that_its_code_is_not_the_commits(tmp_path: Path) -> None:
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
