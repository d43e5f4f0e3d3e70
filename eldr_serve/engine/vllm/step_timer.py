"""The times of an engine's steps, measured in vLLM's workers."""

from __future__ import annotations

import time
from collections import deque
from typing import Any

import torch

from eldr_serve.engine.vllm.capture.host_copy import HostCopy


class StepTimer:
    """Measures the seconds from a step's start in the worker to the end of its forward.

    On CPUs the forward has ended when it returns. The time of the thread is measured, because engines may
    share cores, and the work of other engines is not a cost of this step. (Wall time would also grow with the
    number of requests on the machine, and a fit would attribute that to the requests of the step.) On CUDA
    the forward has only been launched when it returns. Therefore CUDA events are recorded, and a step's
    time is known one or more steps later.
    """

    def __init__(self, device: torch.device | str) -> None:
        self._cuda = torch.device(device).type == "cuda"
        self._start: Any = None
        self._end: Any = None
        self._unfinished: deque[tuple[Any, Any, HostCopy | None, dict[str, int]]] = deque()

    def begin(self) -> None:
        """Record the start of a step."""
        self._start, self._end = self._now(), None

    def stop(self) -> None:
        """Record the end of the step's forward; only the first call in a step counts.

        Model Runner V2 reports the end (`finish_forward`), since sampling comes before `wait_for_save`. V1
        does not, but runs nothing between the forward and `wait_for_save`.
        """
        if self._end is None:
            self._end = self._now()

    def finish(self, record: dict[str, int], active: HostCopy | None) -> None:
        """Store the record of the step just stopped, and its active experts int64[L] if they were counted."""
        self._unfinished.append((self._start, self._end, active, record))

    def take_completed(self) -> list[dict[str, Any]]:
        """Return the records of steps whose time and experts have become available, each of them once."""
        completed = []
        while self._unfinished and self._is_ready(*self._unfinished[0][1:3]):
            start, end, active, record = self._unfinished.popleft()
            seconds = start.elapsed_time(end) / 1000 if self._cuda else end - start
            step: dict[str, Any] = record | {"seconds": seconds}
            if active is not None:
                by_layer = active.wait().tolist()
                step |= {"active_experts": sum(by_layer) / len(by_layer), "active_by_layer": by_layer}
            completed.append(step)
        return completed

    def _is_ready(self, end: Any, active: HostCopy | None) -> bool:
        if active is not None:
            return active.ready
        return not self._cuda or bool(end.query())

    def _now(self) -> Any:
        if not self._cuda:
            return time.thread_time()
        event: Any = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
