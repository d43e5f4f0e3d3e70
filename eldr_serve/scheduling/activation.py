"""Expected activation of experts in a decode step of each worker.

A request's activation is stored as levels, one byte per expert and layer, so that thousands of running
requests need little memory.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from eldr_serve.scheduling.types import PlacementRequest

# The level of a probability p encodes its depth -log(1 - p) as _DEPTH_UNIT * level**2, so that small p are
# precise.
_MAX_DEPTH = 4.0  # p = 0.98; the marginal cost of an expert that is nearly always active is negligible
_DEPTH_UNIT = _MAX_DEPTH / 255**2
_SQUARES = np.arange(256, dtype=np.int32) ** 2
_TIME_CONSTANT = 64  # requests over which the mean is taken
_COARSE_STRIDE = 8  # the cells of every _COARSE_STRIDE-th layer come first in a row
_PROBABILITY_OF_LEVEL = -np.expm1(-_DEPTH_UNIT * _SQUARES).astype(np.float32)  # level -> p

Levels = NDArray[np.uint8]


def levels_of(activation: NDArray[np.floating[Any]]) -> Levels:
    """Return the level nearest to each probability; level i means 1 - exp(-_DEPTH_UNIT * i**2)."""
    depth = -np.log1p(-np.minimum(activation, 1 - np.exp(-_MAX_DEPTH)))
    levels: Levels = np.rint(np.sqrt(depth / _DEPTH_UNIT)).astype(np.uint8)
    return levels


def activation_of(levels: Levels) -> NDArray[np.float32]:
    """Return the probability that each level stands for, float32."""
    activation: NDArray[np.float32] = _PROBABILITY_OF_LEVEL[levels]
    return activation


def extend_rows(rows: NDArray[Any], num_workers: int, *cells: int, fill: float = 0) -> NDArray[Any]:
    """Return `rows` extended to shape [num_workers, *cells] by rows of `fill`."""
    new = np.full((num_workers - len(rows), *cells), fill, rows.dtype)
    return np.concatenate([rows.reshape(len(rows), *cells), new])


class ExpectedActivation:
    """The activation of experts that is expected from the requests of each worker.

    A request activates expert e of layer l in a step with probability p[l,e], estimated as its counts divided
    by the number of counted tokens. A worker's batch leaves the expert idle with probability prod(1 - p). The
    arrays have a row for each worker, with all cells (l, e). The cells of every eighth layer come first.

    Attributes:
        running: for each running request, the position of its worker and its levels.
        mean: float32[L*E], mean p of recent requests, with their latest counts; None before the first.
        layers: int64[L], the layers in the order in which a row has them.
        num_coarse_cells: number of cells of every eighth layer, which come first.
    """

    def __init__(self) -> None:
        self._p_idle = np.ones((0, 0), np.float32)
        self._expected_active = np.zeros(0)
        self._changed: set[int] = set()  # positions whose `squared_levels` are newer than the other arrays
        self.running: dict[str, tuple[int, Levels]] = {}
        self.layers = np.zeros(0, np.int64)
        self.num_coarse_cells = 0
        self.squared_levels = np.zeros((0, 0), np.int32)  # [W, L*E], sum of squared levels
        self._shape: tuple[int, ...] = ()
        self.mean: NDArray[np.float32] | None = None
        self._mean_levels: Levels | None = None  # levels of `mean`; None after a change of it
        self._measured: dict[str, tuple[NDArray[Any], int]] = {}  # counts and tokens of running requests
        self._num_observed = 0  # number of requests in the mean
        self._sequence: dict[str, int] = {}  # number of each running request in the mean

    @property
    def p_idle(self) -> NDArray[np.float32]:
        """Return the probability that a step of the worker does not activate the expert, float32[W, L*E]."""
        self._refresh()
        return self._p_idle

    @property
    def expected_active(self) -> NDArray[np.float64]:
        """Return the expected number of active experts of a step, float64[W]."""
        self._refresh()
        return self._expected_active

    def estimate_levels(self, request: PlacementRequest) -> Levels | None:
        """Estimate the levels of a request, uint8[L*E], from its counts, or else from the mean.

        Return None if there are neither counts nor a mean. The first usable counts set the shape of all rows.
        """
        counts = request.expert_counts
        if counts is not None and self.has_usable_counts(request):
            if self._is_running(request):  # a change of workers assigns all running requests again
                return self.running[request.request_id][1]
            if not self._shape:
                self._set_shape(counts.shape)
            frequencies = counts[self.layers].reshape(-1).astype(np.float32)
            frequencies /= request.counted_tokens
            return levels_of(frequencies)
        if self._mean_levels is None and self.mean is not None:
            self._mean_levels = levels_of(self.mean)
        return self._mean_levels

    def _set_shape(self, shape: tuple[int, ...]) -> None:
        self._shape = shape
        order = np.arange(shape[0])
        self.layers = np.concatenate([order[start::_COARSE_STRIDE] for start in range(_COARSE_STRIDE)])
        self.num_coarse_cells = len(order[::_COARSE_STRIDE]) * shape[1]
        num_workers = len(self.squared_levels)  # none of these rows has a cell yet
        self.squared_levels, self._p_idle = self.squared_levels[:0], self._p_idle[:0]
        self._expected_active = self._expected_active[:0]
        self.grow(num_workers)

    def _is_running(self, request: PlacementRequest) -> bool:
        """Return whether the request is running with the same counts."""
        counts, tokens = self._measured.get(request.request_id, (None, 0))
        return counts is request.expert_counts and tokens == request.counted_tokens

    def has_usable_counts(self, request: PlacementRequest) -> bool:
        """Return whether the request has counts of the right shape."""
        counts = request.expert_counts
        return (
            counts is not None
            and counts.ndim == 2
            and request.counted_tokens > 0
            and self._shape in ((), counts.shape)
        )

    def on_assigned(self, request: PlacementRequest, position: int, levels: Levels | None) -> None:
        """Add a request with these levels to the worker at `position`; remove it from its previous worker."""
        previous_position, before = self.running.get(request.request_id, (-1, None))
        if levels is not None and levels is before and position == previous_position:
            return
        self._remove(request.request_id)
        if levels is None:
            self._sequence.pop(request.request_id, None)
            return
        self.grow(position + 1)
        self.running[request.request_id] = (position, levels)
        self.squared_levels[position] += _SQUARES[levels]
        self._changed.add(position)
        if self.has_usable_counts(request):
            assert request.expert_counts is not None
            self._measured[request.request_id] = (request.expert_counts, request.counted_tokens)
            self._learn(request.request_id, activation_of(levels), before)

    def on_finished(self, request_id: str) -> None:
        """Remove a request; ignore an unknown one."""
        self._remove(request_id)
        self._sequence.pop(request_id, None)

    def _remove(self, request_id: str) -> None:
        position, levels = self.running.pop(request_id, (-1, None))
        self._measured.pop(request_id, None)
        if levels is not None:
            self.squared_levels[position] -= _SQUARES[levels]
            self._changed.add(position)

    def grow(self, num_workers: int) -> None:
        """Extend the arrays to at least this number of workers; before the first counts rows are empty."""
        if num_workers > len(self.squared_levels):
            num_cells = int(np.prod(self._shape)) if self._shape else 0
            self.squared_levels = extend_rows(self.squared_levels, num_workers, num_cells)
            self._p_idle = extend_rows(self._p_idle, num_workers, num_cells, fill=1)
            self._expected_active = extend_rows(self._expected_active, num_workers)

    def _learn(self, request_id: str, p: NDArray[np.float32], before: Levels | None) -> None:
        self._mean_levels = None
        number = self._sequence.get(request_id)
        if number is not None and before is not None and self.mean is not None:  # corrected counts
            self.mean += (p - activation_of(before)) * np.float32(self._weight(number))
            np.maximum(self.mean, 0, out=self.mean)
            return
        self._num_observed += 1
        self._sequence[request_id] = self._num_observed
        if self.mean is None:
            self.mean = p.copy()
        else:
            self.mean += (p - self.mean) / np.float32(min(self._num_observed, _TIME_CONSTANT))

    def _weight(self, number: int) -> float:
        """Return the current weight of the request with this number in the mean."""
        full = min(self._num_observed, _TIME_CONSTANT)
        return (1 - 1 / _TIME_CONSTANT) ** (self._num_observed - max(number, full)) / full

    def _refresh(self) -> None:
        for position in self._changed:
            p_idle = self._p_idle[position]
            np.exp(-_DEPTH_UNIT * self.squared_levels[position], out=p_idle, casting="same_kind")
            self._expected_active[position] = len(p_idle) - p_idle.sum(dtype=np.float64)
        self._changed.clear()
