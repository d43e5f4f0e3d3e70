"""Times of work in a CUDA graph, measured with CUDA events, which exclude the host's time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class TimedGraph:
    """A CUDA graph of calls, which is replayed with other inputs in the same tensors.

    `work` reads and writes tensors at fixed addresses. It runs before the capture, which compiles its
    kernels.
    """

    def __init__(self, work: Callable[[], object]) -> None:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                work()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._output = work()  # keeps the graph's tensors alive
        # The GPU sums this tensor before each replay. The sum takes long enough for the host to queue the
        # replay meanwhile, so that no measured time includes the host's. It also evicts the inputs from the
        # L2 cache, because the tensor is larger than the cache.
        self._flushed = torch.ones(1 << 26, dtype=torch.float32, device="cuda")

    def time_replay(self) -> float:
        """Time one replay on the GPU, in seconds, without inputs in the L2 cache."""
        start, end = (self._event() for _ in range(2))
        self._flushed.sum()
        start.record()
        self._graph.replay()
        end.record()
        torch.cuda.synchronize()
        return float(start.elapsed_time(end)) / 1000

    def _event(self) -> Any:
        return torch.cuda.Event(enable_timing=True)
