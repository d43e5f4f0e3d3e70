"""How fast the cores compute, and a clock that goes as fast as they do.

Cores of shared machines are slower by up to a third for seconds or minutes: by their frequency, by their
neighbours, by what the hypervisor takes away. Where that is as large as what is measured, time is told by
the work that the cores could do in it.

    python -m benchmarks.rig.pace CORE FILE     notes the pace of a core until its parent is gone (`probed`)
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.rig.engines import process
from loadgen.block import Block
from offline.cli import BadInput

_EVERY_S = 0.25  # a note
_WINDOW_S = 5.0  # pace is taken as even within


class Pace:
    """How fast this core computes now, by a matrix product that stays in its cache."""

    def __init__(self) -> None:
        import torch

        self._multiply = lambda: torch.mm(left, right, out=out)
        left, right, out = torch.randn(128, 256), torch.randn(256, 256), torch.empty(128, 256)
        self._last: deque[float] = deque(maxlen=3)

    def once(self) -> float:
        """CPU time of the product, s."""
        self._multiply()  # brings it into the cache
        start = time.thread_time()
        for _ in range(4):
            self._multiply()
        return time.thread_time() - start

    def seconds(self) -> float:
        """CPU time of the product, s, mean of the last three times that it was asked for."""
        self._last.append(self.once())
        return sum(self._last) / len(self._last)

    def typical(self) -> float:
        """Median over about a third of a second."""
        return float(np.median([self.seconds() for _ in range(300)]))


@contextmanager
def probed(folder: Path) -> Iterator[None]:
    """Note the pace of every core of this process, some times a second, into files of `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    with ExitStack() as probes:
        for core in sorted(os.sched_getaffinity(0)):
            command = [
                sys.executable,
                "-m",
                "benchmarks.rig.pace",
                str(core),
                str(folder / f"pace_{core}.jsonl"),
            ]
            probes.enter_context(process(command, env={}, log=folder / f"pace_{core}.log"))
        yield


class EvenClock:
    """Tells time by the work that the cores could do in it.

    Args:
        notes: of each core a float64[n, 4] of Unix time, s, CPU time of the product, s, and ticks so far
            that were stolen and all.

    A second of it is a second at the mean speed of the notes.
    """

    def __init__(self, notes: Sequence[np.ndarray]) -> None:
        begin, end = min(n[0, 0] for n in notes), max(n[-1, 0] for n in notes)
        edges = np.linspace(begin, end, 1 + max(1, round((end - begin) / _WINDOW_S)))
        speed, kept = np.mean([_speed(n, edges) for n in notes], axis=0)
        self._edges, self._slowdown = edges, np.mean(speed) / speed
        work = speed * kept
        self._done = np.concatenate([[0.0], np.cumsum(work / np.mean(work) * np.diff(edges))])

    @classmethod
    def read(cls, folder: Path) -> EvenClock:
        """From what `probed` noted.

        Raises:
            BadInput: nothing was.
        """
        files = sorted(folder.glob("pace_*.jsonl"))
        notes = [[json.loads(line) for line in file.read_text().splitlines()] for file in files]
        if not any(notes):
            raise BadInput(f"{folder} holds no notes of the cores' pace")
        return cls([np.array(of_core, float) for of_core in notes if of_core])

    def seconds(self, start: float, end: float) -> float:
        """Even time from one Unix time to another."""
        if start < self._edges[0] - _WINDOW_S or end > self._edges[-1] + _WINDOW_S:
            raise BadInput("the cores' pace was not noted all the time")
        return float(np.interp(end, self._edges, self._done) - np.interp(start, self._edges, self._done))

    def slowdown(self, start: float, end: float) -> float:
        """How much more CPU time than at the mean speed the same work took between two Unix times."""
        inside = (self._edges[1:] > start) & (self._edges[:-1] < end)
        return float(np.mean(self._slowdown[inside]))


def evened(block: Block, clock: EvenClock) -> Block:
    """The block with all times by the clock; each request still ends when it did.

    The gaps between tokens and the hand-over, whose own begin is not known, go with the whole request.
    """
    requests = [_evened(record, clock) for record in block.requests]
    engines = block.engines
    if engines is not None and requests:
        first = min(r["sent_unix_s"] for r in block.requests)
        last = max(r["sent_unix_s"] + (r.get("end_s") or 0.0) for r in block.requests)
        engines = engines | {"seconds": engines["seconds"] / clock.slowdown(first, last)}
    return replace(block, requests=requests, engines=engines)


def _evened(record: dict[str, Any], clock: EvenClock) -> dict[str, Any]:
    if record.get("ttft_s") is None or record.get("end_s") is None:
        return record
    sent, end_s = record["sent_unix_s"], record["end_s"]
    ttft_s, whole_s = (clock.seconds(sent, sent + record[name]) for name in ("ttft_s", "end_s"))
    rate = whole_s / end_s
    decode_s = end_s - record["ttft_s"]
    decode_rate = (whole_s - ttft_s) / decode_s if decode_s else 1.0
    even = {
        "sent_s": record["sent_s"] + end_s - whole_s,
        "ttft_s": ttft_s,
        "end_s": whole_s,
        "tpot_s": None if record["tpot_s"] is None else record["tpot_s"] * decode_rate,
        "itl_s": [rate * gap for gap in record["itl_s"]],
        "handover_s": None if record["handover_s"] is None else rate * record["handover_s"],
    }
    return record | even


def _speed(notes: np.ndarray, edges: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """A core's speed in each window, 1/s, and the share of it that was not stolen."""
    windows = len(edges) - 1
    window = np.clip(np.searchsorted(edges, notes[:, 0], side="right") - 1, 0, windows - 1)
    count = np.bincount(window, minlength=windows)
    known = np.flatnonzero(count)
    # A note that was interrupted took many times as long: hence the geometric mean.
    logs = np.bincount(window, weights=np.log(notes[:, 1]), minlength=windows)[known] / count[known]
    stolen, ticks = (np.diff(np.interp(edges, notes[:, 0], notes[:, column])) for column in (2, 3))
    return np.exp(-np.interp(np.arange(windows), known, logs)), 1 - stolen / np.maximum(ticks, 1)


def _ticks(core: int) -> tuple[int, int]:
    """Ticks of the core that the hypervisor took, and all."""
    with open("/proc/stat") as lines:
        found = next(line for line in lines if line.startswith(f"cpu{core} "))
    ticks = [int(part) for part in found.split()[1:9]]
    return ticks[7], sum(ticks)


def _note(core: int, file: Path) -> None:
    import torch

    torch.set_num_threads(1)
    os.sched_setaffinity(0, {core})
    pace, parent = Pace(), os.getppid()
    with file.open("a", buffering=1) as out:
        while os.getppid() == parent:
            out.write(json.dumps([time.time(), pace.once(), *_ticks(core)]) + "\n")
            time.sleep(_EVERY_S)


if __name__ == "__main__":
    _note(int(sys.argv[1]), Path(sys.argv[2]))
