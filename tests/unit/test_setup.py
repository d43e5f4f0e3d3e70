"""`make setup` with pip, and with uv if pip fails. Fakes of both record their calls."""

import subprocess
from pathlib import Path

import pytest

from tests.support.processes import run_command

PIP_ERROR = "ERROR: No matching distribution found for torch==2.13.0+cpu"


def make_setup(
    venv: Path, *, extra: str = "cpu", pip_can: bool, uv_can: bool = True
) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    """Return the finished `make setup`, and the calls of pip and uv."""
    calls = venv / "calls"
    (venv / "bin").mkdir(parents=True)
    for name, refused, can in (("pip", "*-e*", pip_can), ("uv", "*", uv_can)):
        stand_in = venv / "bin" / name
        stand_in.write_text(
            f'#!/bin/sh\necho "{name} $*" >> {calls}\n'
            f'case "$*" in {refused}) {"exit 0" if can else f"echo {PIP_ERROR!r} >&2; exit 1"};; esac\n'
        )
        stand_in.chmod(0o755)
    done = run_command("make", "setup", "PYTHON=true", f"VENV={venv}", f"EXTRA={extra}", timeout_s=60)
    return done, calls.read_text().splitlines()


def test_uv_is_not_used_where_pip_succeeds(tmp_path: Path) -> None:
    done, calls = make_setup(tmp_path, pip_can=True)
    assert done.returncode == 0, done.stderr
    assert not any(call.startswith("uv") for call in calls)
    assert not any("install --quiet uv" in call for call in calls)


def test_uv_installs_the_cpu_build_where_pip_finds_none(tmp_path: Path) -> None:
    done, calls = make_setup(tmp_path, pip_can=False)
    assert done.returncode == 0, done.stderr
    assert PIP_ERROR in done.stderr
    assert done.stderr.count("trying uv") == 1
    assert calls.index("pip install --quiet uv") < calls.index(
        f"uv pip install --python {tmp_path}/bin/python --torch-backend cpu -e .[cpu,dev]"
    )
    assert (tmp_path / ".installed-cpu").exists()


@pytest.mark.parametrize("extra", ["cpu", "gpu"])
def test_a_failed_setup_explains_what_to_do(tmp_path: Path, extra: str) -> None:
    done, calls = make_setup(tmp_path, extra=extra, pip_can=False, uv_can=False)
    assert done.returncode != 0
    assert PIP_ERROR in done.stderr
    assert "run make setup again" in done.stderr
    assert any(call.startswith("uv") for call in calls) == (extra == "cpu")
    assert not (tmp_path / f".installed-{extra}").exists()
