"""The commands of a cluster run, and processes that a cluster leaves behind."""

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from benchmarks.lib.cluster import ROOT
from benchmarks.serving.ray_up import DOWN, STOP, UP, left_behind, ray_up, steps


def test_a_dry_run_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    ray_up(requests=20, run_time_s=5, dry_run=True)
    lines = capsys.readouterr().out.splitlines()
    assert lines == [UP, *(step.command for step in steps(20, 5)), STOP, DOWN]
    assert any(line.startswith("serve deploy") for line in lines)
    assert sum(line.startswith("ray job submit") for line in lines) == 2


def test_files_named_by_the_commands_exist() -> None:
    for command in [UP, *(step.command for step in steps(20, 5)), STOP, DOWN]:
        for word in command.split():
            if word.endswith((".yaml", ".py")):
                assert (ROOT / word).exists(), command


def test_jobs_and_replicas_run_where_the_cluster_file_copies_to() -> None:
    cluster = yaml.safe_load((ROOT / "ray_cluster_local.yaml").read_text())
    (folder,) = cluster["file_mounts"]
    assert all(folder in command for command in cluster["head_start_ray_commands"])
    assert f"{folder}/.venv/bin/ray stop" in STOP
    assert 'PATH="$PWD/.venv/bin:$PATH"' in cluster["head_start_ray_commands"][-1]


def test_the_cluster_changes_no_shell_startup_and_runs_nothing_from_a_world_writable_folder() -> None:
    text = (ROOT / "ray_cluster_local.yaml").read_text()
    assert "bashrc" not in text
    assert "profile" not in text
    assert "/tmp" not in text


def test_a_process_that_is_left_in_the_folder_is_found(tmp_path: Path) -> None:
    assert left_behind(tmp_path) == []
    code = "import sys; print(flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", code], cwd=tmp_path, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        process.stdout.readline()
        assert [code in command for command in left_behind(tmp_path)] == [True]
        process.stdin.close()
    assert left_behind(tmp_path) == []
