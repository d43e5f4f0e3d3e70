"""`make test` runs every part. Its last lines and exit status cover all parts."""

import sys
from pathlib import Path

import pytest

from tests import suite


@pytest.fixture
def parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # a second for each part
    bodies = {
        "fails": "def test_good(): pass\ndef test_bad(): assert 0, 'a reason'",
        "cannot": "import no_such_module",
        "dies": "import os\ndef test_end(): os._exit(7)",
        "passes": "def test_good(): pass",
    }
    for name, body in bodies.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / f"test_{name}.py").write_text(body)
    return {name: ["-ra", "-p", "no:cacheprovider", str(tmp_path / name)] for name in bodies}


def test_all_parts_run_and_the_last_lines_name_failures(
    parts: dict[str, list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert suite.run(parts, tmp_path / "out") == 1
    output = capsys.readouterr().out.partition("##### all parts\n")[2].splitlines()
    words = {name: f"{name}: {'passed' if name == 'passes' else 'failed'} in " for name in parts}
    starts = [next(n for n, line in enumerate(output) if line.startswith(words[name])) for name in parts]
    fails, cannot, dies, passes = (
        output[start + 1 : end] for start, end in zip(starts, [*starts[1:], len(output)], strict=True)
    )
    assert fails[0].startswith("FAILED ")
    assert "::test_bad" in fails[0]
    assert "1 failed, 1 passed" in fails[1]
    assert "test_cannot.py" in cannot[0]
    assert "1 error" in cannot[1]
    assert dies[0] == "FAILED no test by name: pytest ended with status 7"
    assert len(passes) == 1
    assert "1 passed" in passes[0]


def test_many_failures_are_counted_and_later_output_is_not_taken_for_a_summary() -> None:
    lines = ["== short test summary info ==", *(f"ERROR t.py::test_{n} - same" for n in range(30))]
    lines += [
        "FAILED t.py::test_x - a reason",
        "=== 1 failed, 30 errors in 12.34s (0:00:12) ===",
        "a warning",
    ]
    result = suite.pytest_result("many", 1, lines, 12.3)
    assert result.failures[0] == "FAILED t.py::test_x - a reason"
    assert result.failures[-1].startswith("... and 21 more in ")
    assert len(result.failures) == suite.SHOWN + 1
    assert result.summary == lines[-2]


def test_the_exit_status_is_0_if_all_parts_pass(parts: dict[str, list[str]], tmp_path: Path) -> None:
    assert suite.run({"passes": parts["passes"]}, tmp_path / "out") == 0


def test_processes_of_the_parts_collect_garbage_less_often(tmp_path: Path) -> None:
    test = tmp_path / "test_threshold.py"
    test.write_text("import gc\ndef test_threshold(): assert gc.get_threshold()[0] == 50_000")
    assert suite.run({"passes": ["-p", "no:cacheprovider", str(test)]}, tmp_path / "out") == 0


def test_a_command_beside_the_parts_runs_with_them_and_its_errors_are_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    begun, test = tmp_path / "begun", tmp_path / "test_waits.py"
    test.write_text(
        "import pathlib, time\ndef test_waits():\n    end = time.monotonic() + 30\n"
        f"    while not pathlib.Path({str(begun)!r}).exists():\n"
        "        assert time.monotonic() < end\n        time.sleep(0.05)\n"
    )
    prints = f"""
import pathlib, sys
pathlib.Path({str(begun)!r}).touch()
print("a.py:1: error: wrong", "a.py:1: note: why", sep="\\n")
print("Found 1 error in 1 file (checked 2 source files)")
sys.exit(1)
"""
    parts = {"waits": ["-p", "no:cacheprovider", str(test)]}
    assert suite.run(parts, tmp_path / "out", {"types": [sys.executable, "-c", prints]}) == 1
    output = capsys.readouterr().out.partition("##### all parts\n")[2].splitlines()
    assert output[0].startswith("waits: passed in ")
    assert output[2].startswith("types: failed in ")
    assert output[3:] == ["a.py:1: error: wrong", "Found 1 error in 1 file (checked 2 source files)"]


def test_the_parts_run_every_file_of_tests() -> None:
    words = {word for arguments in suite.PARTS.values() for word in arguments}
    ignored = {word.partition("=")[2] for word in words if word.startswith("--ignore=")}
    assert ignored == set(suite.ALONE)
    paths = {suite.ROOT / word for word in words if word.startswith("tests/")}
    assert all(path.exists() for path in paths)
    files = set((suite.ROOT / "tests").rglob("test_*.py"))
    assert [file for file in files if paths.isdisjoint({file, *file.parents})] == []
