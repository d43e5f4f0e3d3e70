"""Run all parts of the suite, even if one fails, and list the failures. `make test` calls it.

The parts run one after the other: each has all cores and the memory for its engines.
mypy runs beside the first: it uses one core, and tests wait for part of their time.
The output of each part and of mypy is also in out/suite.
"""

import os
import re
import subprocess
import sys
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
OUT = ROOT / "out" / "suite"
PARALLEL = ["-n", "2", "--dist", "loadfile", "--no-loadscope-reorder"]  # long files first, in the given order
# With "loadfile", pytest-xdist waits without end for a worker that replaces a dead one.
PARALLEL += ["--max-worker-restart", "0"]
# Files that start an application of their own. Beside the engine tests, whose processes use both cores, its
# engines would be so slow that the ingress counts them as lost.
ALONE = ["tests/e2e/test_own_model.py"]
# The longest files first, so that both cores end together.
_LONG = ["exact", "aborted_reads", "families", "speculative", "samples", "prefixes", "ep"]
_ENGINE = [f"tests/engine/test_{name}.py" for name in _LONG]
_OTHERS = {f"tests/engine/{file.name}" for file in (ROOT / "tests/engine").glob("test_*.py")} - {*_ENGINE}
PARTS = {
    "unit": [*PARALLEL, "--timeout", "300", "tests/unit"],
    "engine": [*PARALLEL, *_ENGINE, *sorted(_OTHERS)],
    "own-model": ALONE,
    "end-to-end": ["tests/e2e", *(f"--ignore={file}" for file in ALONE)],
}
BESIDE = {"types": [sys.executable, "-m", "mypy"]}  # commands like mypy, which start with the first part
FAST_IMPORTS = ROOT / "tests" / "support" / "fast_imports"
SHOWN = 10  # maximum failures listed per part, so that every part is near the end


@dataclass(frozen=True)
class Result:
    """The end of one part, or of a command beside the parts.

    Attributes:
        failures: a line for each failure, at most SHOWN and one for the others; none if it passed.
        summary: the line that counts.
    """

    name: str
    status: int
    failures: list[str]
    summary: str
    seconds: float


def pytest_result(name: str, status: int, lines: list[str], seconds: float) -> Result:
    """Return a part's result from the output of pytest, after whose last line other processes may print."""
    start = max((n for n, line in enumerate(lines) if "test summary info" in line), default=0)
    found = [line for line in lines[start:] if line.startswith(("FAILED ", "ERROR "))]
    found.sort(key=lambda line: line.startswith("ERROR "))
    found = found or [f"FAILED no test by name: pytest ended with status {status}"]
    counts = (line for line in reversed(lines) if re.search(r"\d \w+.* in [\d.]+s\b", line))
    return Result(name, status, _failures(name, status, found), next(counts, "no summary of pytest"), seconds)


def mypy_result(name: str, status: int, lines: list[str], seconds: float) -> Result:
    """Return the result of a command whose output has a line for each error, and last their number."""
    found = [line for line in lines if ": error:" in line] or lines[-SHOWN:]
    return Result(name, status, _failures(name, status, found), lines[-1] if lines else "no output", seconds)


def _failures(name: str, status: int, found: list[str]) -> list[str]:
    if status == 0:
        return []
    more = [f"... and {len(found) - SHOWN} more in {OUT / name}.txt"] if len(found) > SHOWN else []
    return found[:SHOWN] + more


def run(parts: Mapping[str, list[str]], folder: Path, beside: Mapping[str, list[str]] = {}) -> int:
    """Run the parts, print what failed, and return the exit status of all of them.

    Args:
        parts: pytest's arguments by the part's name.
        folder: for the output of each part.
        beside: commands that run at the same time, by name.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(max(len(beside), 1)) as threads:
        running = [threads.submit(_run_beside, name, beside[name], folder / f"{name}.txt") for name in beside]
        results = [_run(name, arguments, folder / f"{name}.txt") for name, arguments in parts.items()]
        results += [command.result() for command in running]
    print("\n##### all parts")
    for result in results:
        print(f"{result.name}: {'failed' if result.status else 'passed'} in {result.seconds:.0f} s")
        print(*result.failures, result.summary, sep="\n")
    return int(any(result.status for result in results))


def _run(name: str, arguments: list[str], output: Path) -> Result:
    print(f"\n##### {name}: pytest {' '.join(arguments)}", flush=True)
    began = time.monotonic()
    command = [sys.executable, "-m", "pytest", *arguments]
    paths = os.pathsep.join(filter(None, [str(FAST_IMPORTS), os.environ.get("PYTHONPATH")]))
    environment = os.environ | {"PYTHONPATH": paths}
    with (
        output.open("w") as file,
        subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        ) as process,
    ):
        assert process.stdout is not None
        while part := process.stdout.read1():
            text = part.decode(errors="replace")
            print(text, end="", flush=True)
            file.write(text)
    lines = output.read_text().strip().splitlines()
    return pytest_result(name, process.returncode, lines, time.monotonic() - began)


def _run_beside(name: str, command: list[str], output: Path) -> Result:
    began = time.monotonic()
    with output.open("w") as file:
        status = subprocess.run(
            command, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT, check=False
        ).returncode
    lines = output.read_text().strip().splitlines()
    return mypy_result(name, status, lines, time.monotonic() - began)


if __name__ == "__main__":
    sys.exit(run(PARTS, OUT, BESIDE))
