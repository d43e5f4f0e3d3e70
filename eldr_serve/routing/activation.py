"""Which experts each worker's requests are expected to activate in a decode step."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from eldr_serve.routing.types import PlacementRequest

# -log(1 - p) is kept as one byte a cell: level i stands for _DEEPEST * (i / 255)**2, fine where p is small.
_DEEPEST = 4.0  # p = 0.98; an expert that is all but always active costs nothing more anyway
UNIT = _DEEPEST / 255**2
_SQUARES = np.arange(256, dtype=np.int32) ** 2
_MEMORY = 64  # requests in the mean; what came before counts for a third
_COARSE = 8  # cells of every _COARSE-th layer come first
_ACTIVE = -np.expm1(-UNIT * _SQUARES).astype(np.float32)  # level -> p

Levels = NDArray[np.uint8]


def levels_of(p: NDArray[np.floating[Any]]) -> Levels:
    """The level nearest to each probability; level i stands for 1 - exp(-UNIT * i**2)."""
    depth = -np.log1p(-np.minimum(p, 1 - np.exp(-_DEEPEST)))
    levels: Levels = np.rint(np.sqrt(depth / UNIT)).astype(np.uint8)
    return levels


def probability(levels: Levels) -> NDArray[np.float32]:
    """float32, p of each level."""
    active: NDArray[np.float32] = _ACTIVE[levels]
    return active


def grown(rows: NDArray[Any], workers: int, *cells: int, fill: float = 0) -> NDArray[Any]:
    """`rows` and below them `fill`, of its dtype, in shape [workers, *cells]."""
    have = len(rows)
    more = np.full((workers - have, *cells), fill, rows.dtype)
    return np.concatenate([rows.reshape(have, *cells), more])


class ExpectedActivation:
    """A request activates expert e of layer l in a step with probability p[l,e], estimated by its
    prefill counts / prompt tokens; a worker's batch leaves the expert idle with probability
    prod(1 - p). Cells (l, e) are in one row, every eighth layer's first.

    Attributes:
        idle: float32[W, L*E], probability that a step of the worker does not activate the expert.
        union: float64[W], experts that a step is expected to activate.
        held: worker and levels of each request.
        mean: float32[L*E], p of recent requests, each once, as it was told last; None before the first.
        layers: int64[L], the order of layers in a row.
        coarse_cells: cells of every eighth layer, which come first.
    """

    def __init__(self) -> None:
        self.idle = np.ones((0, 0), np.float32)
        self.union = np.zeros(0)
        self.held: dict[str, tuple[int, Levels]] = {}
        self.layers = np.zeros(0, np.int64)
        self.coarse_cells = 0
        self.depth = np.zeros((0, 0), np.int32)  # [W, L*E], sum of squared levels
        self._shape: tuple[int, ...] = ()
        self.mean: NDArray[np.float32] | None = None
        self._learned = 0  # requests that the mean was made of
        self._number: dict[str, int] = {}  # of each request that is held, among them

    def levels(self, request: PlacementRequest) -> Levels | None:
        """uint8[L*E]; the recent mean's where the request has no usable counts; None without either."""
        counts = request.signature
        if counts is not None and self.usable(request):
            if not self._shape:
                self._shape = counts.shape
                order = np.arange(len(counts))
                self.layers = np.concatenate([order[start::_COARSE] for start in range(_COARSE)])
                self.coarse_cells = len(order[::_COARSE]) * counts.shape[1]
            p = counts[self.layers].reshape(-1).astype(np.float32)
            p /= request.prompt_tokens
        elif self.mean is not None:
            p = self.mean
        else:
            return None
        return levels_of(p)

    def usable(self, request: PlacementRequest) -> bool:
        """Whether the request has counts of its own, of the shape of the others'."""
        counts = request.signature
        return (
            counts is not None
            and counts.ndim == 2
            and request.prompt_tokens > 0
            and self._shape in ((), counts.shape)
        )

    def on_assigned(self, request: PlacementRequest, worker: int, levels: Levels | None) -> None:
        """The request runs on `worker` from now on; `levels` are those that it had."""
        before = self._leave(request.request_id)
        if levels is None:
            self._number.pop(request.request_id, None)
            return
        self.grow(worker + 1)
        self.held[request.request_id] = (worker, levels)
        self.depth[worker] += _SQUARES[levels]
        self._refresh(worker)
        if self.usable(request):
            self._learn(request.request_id, probability(levels), before)

    def on_finished(self, request_id: str) -> None:
        """The request no longer runs; unknown ones are ignored."""
        self._leave(request_id)
        self._number.pop(request_id, None)

    def _leave(self, request_id: str) -> Levels | None:
        worker, levels = self.held.pop(request_id, (-1, None))
        if levels is not None:
            self.depth[worker] -= _SQUARES[levels]
            self._refresh(worker)
        return levels

    def grow(self, workers: int) -> None:
        """There are at least so many workers."""
        if workers > len(self.depth):
            cells = int(np.prod(self._shape))
            self.depth = grown(self.depth, workers, cells)
            self.idle = grown(self.idle, workers, cells, fill=1)
            self.union = grown(self.union, workers)

    def _learn(self, request_id: str, p: NDArray[np.float32], before: Levels | None) -> None:
        number = self._number.get(request_id)
        if number is not None and before is not None and self.mean is not None:  # it is told anew
            self.mean += (p - probability(before)) * np.float32(self._share(number))
            np.maximum(self.mean, 0, out=self.mean)
            return
        self._learned += 1
        self._number[request_id] = self._learned
        if self.mean is None:
            self.mean = p.copy()
        else:
            self.mean += (p - self.mean) / np.float32(min(self._learned, _MEMORY))

    def _share(self, number: int) -> float:
        """Of the mean, that the request learnt as this one has by now."""
        full = min(self._learned, _MEMORY)
        return (1 - 1 / _MEMORY) ** (self._learned - max(number, full)) / full

    def _refresh(self, worker: int) -> None:
        np.exp(-UNIT * self.depth[worker], out=self.idle[worker], casting="same_kind")
        self.union[worker] = self.idle.shape[1] - self.idle[worker].sum(dtype=np.float64)
