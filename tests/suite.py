"""Run all parts of the suite, even if one fails, and list the failures. `make test` calls it.

The end-to-end tests often wait, so the unit tests run beside them, at a lower priority since the others have
limits of time. The engine tests come after both: engines of two parts would not fit into the memory.
The output of each part is shown from its beginning, one part after the other; out/suite has all of it.
"""

from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[1]
OUT = ROOT / "out" / "suite"
PARALLEL = ["-n", "2", "--dist", "loadfile", "--no-loadscope-reorder"]  # long files first, as they are named
STAGES = [
    {"unit": [*PARALLEL, "tests/unit"], "end-to-end": ["tests/e2e"]},
    {"engine": [*PARALLEL, "tests/engine"]},
]
NICENESS = {"unit": 10}


@dataclass
class Part:
    """A run of pytest in its own process."""

    name: str
    arguments: list[str]
    folder: Path
    process: subprocess.Popen[bytes] = field(init=False)

    @property
    def output(self) -> Path:
        return self.folder / f"{self.name}.txt"

    def start(self) -> None:
        """Start the process, with its output in a file."""
        nice = ["nice", "-n", str(NICENESS.get(self.name, 0))]
        command = [*nice, sys.executable, "-m", "pytest", *self.arguments]
        with self.output.open("wb") as file:
            self.process = subprocess.Popen(command, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT)

    def follow(self) -> None:
        """Print the output live until the process ends."""
        print(f"\n##### {self.name}: pytest {' '.join(self.arguments)}", flush=True)
        with self.output.open("rb") as file:
            ended = False
            while not ended:
                ended = self.process.poll() is not None
                while found := file.read(1 << 16):
                    sys.stdout.buffer.write(found)
                    sys.stdout.buffer.flush()
                if not ended:
                    time.sleep(0.2)

    def lines(self) -> list[str]:
        """Return pytest's output."""
        return self.output.read_text(errors="replace").strip().splitlines()

    def failed(self) -> list[str]:
        """Return pytest's lines on failed tests, or the exit status if it failed without naming any."""
        if self.process.returncode == 0:
            return []
        lines = self.lines()
        start = max((n for n, line in enumerate(lines) if "test summary info" in line), default=0)
        found = [line for line in lines[start:] if line.startswith(("FAILED ", "ERROR "))]
        return found or [f"FAILED no test by name: pytest ended with status {self.process.returncode}"]


def run(stages: list[dict[str, list[str]]], folder: Path) -> int:
    """Run the parts, stage by stage, print what failed, and return the exit status of all of them.

    Args:
        stages: parts that run at once, each a name and pytest's arguments.
        folder: for the output of each part.
    """
    folder.mkdir(parents=True, exist_ok=True)
    ended = [part for stage in stages for part in _ended(stage, folder)]
    print("\n##### all parts")
    for part in ended:
        print(f"{part.name}: {'failed' if part.process.returncode else 'passed'}")
        print(*part.failed(), *part.lines()[-1:], sep="\n")
    return int(any(part.process.returncode for part in ended))


def _ended(stage: dict[str, list[str]], folder: Path) -> list[Part]:
    """Run the parts of one stage to their end."""
    started: list[Part] = []
    try:
        for name, arguments in stage.items():
            started.append(Part(name, arguments, folder))
            started[-1].start()
        for part in started:
            part.follow()
    finally:
        for part in started:
            if part.process.poll() is None:
                part.process.terminate()
                part.process.wait(60)
    return started


if __name__ == "__main__":
    sys.exit(run(STAGES, OUT))
