"""Engines for replays, each in its own process on one core, or a single one on a GPU."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from multiprocessing.queues import SimpleQueue
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

import numpy as np

from benchmarks.lib.replay.engine import ReplayArrival, ReplayEngine, StepRecords
from eldr_serve.errors import ServiceFailedError, UserInputError

ReplayTimes = tuple[dict[str, np.ndarray], StepRecords]


class ReplayEngines(Protocol):
    """The interface of objects that serve arrivals: EnginePool, or a stand-in without engines."""

    def probe_s(self) -> float:
        """Return the CPU time that the matrix product of CpuSpeed takes now, in seconds."""

    def replay(self, arrivals: list[ReplayArrival], probe_s: float) -> Future[ReplayTimes]:
        """Serve arrivals. The future gives the token times of each request, in seconds, and the steps."""


class EngineProcesses:
    """A context manager of engine processes. Its exit raises ServiceFailedError if one of them has died."""

    def __init__(self, num_processes: int, start: Callable[..., None], *arguments: Any) -> None:
        context = get_context("spawn")
        self._pool = ProcessPoolExecutor(num_processes, context, initializer=start, initargs=arguments)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pool.shutdown(cancel_futures=True)
        if isinstance(error, BrokenProcessPool):
            raise ServiceFailedError(
                "an engine died (out of memory?); results are kept; run the command again to continue"
            ) from error


class EnginePool(EngineProcesses):
    """A context manager of `engines` replay engines of one model, each on its own core, or one on a GPU.

    Raises UserInputError for fewer cores than engines, or several engines on a GPU.
    """

    def __init__(self, model: Path, engines: int, device: str = "cpu") -> None:
        cores = sorted(os.sched_getaffinity(0))
        if device != "cpu" and engines > 1:
            raise UserInputError(
                f"--engines is {engines}, but engines on one GPU slow each other: leave it at 1"
            )
        if engines > len(cores):
            raise UserInputError(f"--engines is {engines}, but there are {len(cores)} cores")
        free = get_context("spawn").SimpleQueue()
        for core in cores[:engines]:
            free.put({core} if device == "cpu" else set(cores))
        super().__init__(engines, _start, str(model), device, free)

    def probe_s(self) -> float:
        """Return the CPU time of the matrix product of CpuSpeed on a core of the engines, in seconds."""
        return self._pool.submit(_probe).result()

    def replay(self, arrivals: list[ReplayArrival], probe_s: float) -> Future[ReplayTimes]:
        """Serve the arrivals on the next free engine, with the clock of ReplayEngine.run."""
        return self._pool.submit(_replay, arrivals, probe_s)


_engine: ReplayEngine


def _start(model: str, device: str, free: SimpleQueue[set[int]]) -> None:
    global _engine
    os.sched_setaffinity(0, free.get())
    _engine = ReplayEngine(model, device=device)


def _probe() -> float:
    return _engine.probe_s()


def _replay(arrivals: list[ReplayArrival], probe_s: float) -> ReplayTimes:
    _engine.warm([arrival.tokens for arrival in arrivals])
    return _engine.run(arrivals, probe_s)
