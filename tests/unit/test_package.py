"""The wheel: its content, and that it runs outside of the repository."""

import os
import subprocess
import sys
import sysconfig
import venv
import zipfile
from functools import partial
from importlib.metadata import version
from pathlib import Path

import pytest
from typer.testing import CliRunner

from eldr_serve.cli import app
from eldr_serve.data_root import model_folder
from tests.support.processes import output
from tests.support.shipped import ROOT

COMMANDS = ("demo", "calibrate", "refit", "simulate", "compare")
HELPS = """
import sys
from typer.testing import CliRunner
from eldr_serve.cli import app
for name in sys.argv[1:]:
    done = CliRunner().invoke(app, [name, "--help"], prog_name="eldr", catch_exceptions=False)
    assert done.exit_code == 0, name
    print(done.output)
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(out)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=120)
    return next(out.glob("*.whl"))


def test_the_wheel_contains_everything_that_the_demo_needs(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {name.split("/")[0].split("-")[0] for name in names} == {"eldr_serve", "offline", "loadgen"}
    tracked = subprocess.run(
        [
            "git",
            "ls-files",
            "eldr_serve",
            "offline",
            "loadgen",
            "deployments",
            "examples/demo_model/weights",
            "examples/demo_model/prompts",
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    data = ("deployments/", "examples/")
    expected = {f"eldr_serve/data/{n}" if n.startswith(data) else n for n in tracked}
    assert expected <= names
    assert wheel.stat().st_size < 20e6


@pytest.mark.long
def test_the_wheel_runs_in_an_empty_folder(wheel: Path, tmp_path: Path) -> None:
    """Use an environment with our dependencies, but without this checkout."""
    venv.create(tmp_path / "venv", with_pip=False)
    python, empty = tmp_path / "venv/bin/python", tmp_path / "empty"
    empty.mkdir()
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "-q", "--no-deps", "--no-compile"]
    subprocess.run([*pip, str(wheel)], check=True, timeout=300)
    packages = next((tmp_path / "venv/lib").glob("*/site-packages"))
    # A line of a .pth file adds a folder without the .pth files in it, so without an editable checkout.
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    inside = partial(output, cwd=empty, env=environment, timeout_s=300)
    eldr = partial(inside, tmp_path / "venv/bin/eldr")
    assert eldr("--version").split() == ["eldr-serve", version("eldr-serve")]
    helps = inside(python, "-c", HELPS, *COMMANDS)
    assert all(f"eldr {command} [OPTIONS]" in helps for command in COMMANDS)
    assert not list(empty.iterdir())
    eldr("deployments", "cpu_demo.yaml", "--copy", "own.yaml")
    # Describe a machine that is large enough.
    machine = ("--nodes", "1", "--gpu", "cpu", "--cpus-per-node", "16", "--memory-gib", "64")
    assert "own.yaml: would start" in eldr("check", "own.yaml", *machine)


def test_the_sdist_builds_the_same_wheel(wheel: Path, tmp_path: Path) -> None:
    hatch = [sys.executable, "-m", "hatchling", "build", "-d", str(tmp_path)]
    subprocess.run([*hatch, "-t", "sdist"], cwd=ROOT, check=True, capture_output=True, timeout=120)
    source = next(tmp_path.glob("*.tar.gz"))
    subprocess.run(["tar", "-xf", source, "-C", tmp_path], check=True)
    folder = tmp_path / source.name.removesuffix(".tar.gz")
    subprocess.run([*hatch, "-t", "wheel"], cwd=folder, check=True, capture_output=True, timeout=120)
    ours, theirs = (zipfile.ZipFile(path) for path in (wheel, next(tmp_path.glob("*.whl"))))
    assert ours.namelist() == theirs.namelist()
    record = next(name for name in ours.namelist() if name.endswith("/RECORD"))
    assert ours.read(record) == theirs.read(record)  # every file's SHA-256


def test_the_version_is_shown() -> None:
    done = CliRunner().invoke(app, ["--version"])
    assert done.stdout.split() == ["eldr-serve", version("eldr-serve")]


def test_the_demo_model_is_found_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert model_folder("examples/demo_model/weights") == str(ROOT / "examples/demo_model/weights")
    (tmp_path / "examples/demo_model/weights").mkdir(parents=True)
    assert model_folder("examples/demo_model/weights") == str(tmp_path / "examples/demo_model/weights")
    assert model_folder("Qwen/Qwen3-30B-A3B") is None
