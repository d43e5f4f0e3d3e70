"""Measurement of how fast CPU cores compute at the moment.

Cores of shared machines are slower by up to a third for seconds or minutes, because of their frequency, their
neighbours, or time stolen by the hypervisor. Where that is as large as the measured effect, times are
normalised for it (benchmarks/lib/normalised_time.py).

    python -m benchmarks.lib.cpu_speed CORE FILE PARENT

records the speed of a core until the parent process, with this id, ends (`record_cpu_speed`).
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks.lib.engines import start_process

_EVERY_S = 0.25  # interval of records


class CpuSpeed:
    """Probe of this core's speed: the time of four matrix products that fit its cache."""

    def __init__(self) -> None:
        import torch

        left, right, out = torch.randn(128, 256), torch.randn(256, 256), torch.empty(128, 256)
        self._multiply = partial(torch.mm, left, right, out=out)
        self._last: deque[float] = deque(maxlen=3)

    def measure(self) -> float:
        """Measure the CPU time of four products, in seconds."""
        self._multiply()  # this brings the matrices into the cache
        start = time.thread_time()
        for _ in range(4):
            self._multiply()
        return time.thread_time() - start

    def measure_recent_mean(self) -> float:
        """Measure again, and return the mean CPU time in the last three calls, in seconds."""
        self._last.append(self.measure())
        return sum(self._last) / len(self._last)

    def measure_median(self) -> float:
        """Measure for about a third of a second, and return the median CPU time, in seconds."""
        return float(np.median([self.measure_recent_mean() for _ in range(300)]))


@contextmanager
def record_cpu_speed(folder: Path) -> Iterator[None]:
    """Record the speed of this process's cores several times per second, in `folder`/cpu_speed_CORE.jsonl.

    A line is [Unix time, CPU time of four products, stolen ticks so far, all ticks so far], times in seconds.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with ExitStack() as probes:
        for core in sorted(os.sched_getaffinity(0)):
            file = folder / f"cpu_speed_{core}.jsonl"
            words = str(core), str(file), str(os.getpid())
            command = [sys.executable, "-m", "benchmarks.lib.cpu_speed", *words]
            probes.enter_context(start_process(command, env={}, log=file.with_suffix(".log")))
        yield


def _ticks(core: int) -> tuple[int, int]:
    """Return the ticks of the core that the hypervisor stole, and all ticks."""
    with open("/proc/stat") as lines:
        times = next(line for line in lines if line.startswith(f"cpu{core} "))
    ticks = [int(part) for part in times.split()[1:9]]
    return ticks[7], sum(ticks)


def _record_until_parent_ends(core: int, file: Path, parent: int) -> None:
    """Record the speed of a core while `parent` is the id of this process's parent.

    The caller gives the id, because the parent may have ended during the imports.
    """
    import torch

    torch.set_num_threads(1)
    os.sched_setaffinity(0, {core})
    probe = CpuSpeed()
    with file.open("a", buffering=1) as out:
        while os.getppid() == parent:
            out.write(json.dumps([time.time(), probe.measure(), *_ticks(core)]) + "\n")
            time.sleep(_EVERY_S)


if __name__ == "__main__":
    _record_until_parent_ends(int(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
