"""BalanceRoute's two stages: which waiting requests go to which workers now (paper, sections 3.2, 4.2)."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from eldr_serve.routing.fscore import FScore, best_subset


class Slots:
    """The workers as they fill up during one dispatch.

    Args:
        free: int64[W], slots.
        loads: float64[W, H+1], KV tokens h steps ahead; changed in place.
    """

    def __init__(self, free: NDArray[np.int64], loads: NDArray[np.float64]) -> None:
        self.free = free
        self._loads = loads
        self._envelope = loads.max(axis=0)
        self._ahead = np.arange(loads.shape[1])

    def next(self) -> int:
        """The worker with the most free slots; of equals the one with the largest least margin."""
        most = np.flatnonzero(self.free == self.free.max())
        if len(most) == 1:
            return int(most[0])
        return int(most[(self._envelope - self._loads[most]).min(axis=1).argmax()])

    def margins(self, worker: int) -> NDArray[np.float64]:
        """float64[H+1], KV tokens below the heaviest worker, h steps ahead."""
        margins: NDArray[np.float64] = self._envelope - self._loads[worker]
        return margins

    def admit(self, worker: int, tokens: Sequence[int]) -> None:
        """Requests of so many prompt tokens run there from now on, to the horizon and beyond."""
        self.free[worker] -= len(tokens)
        self._loads[worker] += sum(tokens) + len(tokens) * self._ahead
        np.maximum(self._envelope, self._loads[worker], out=self._envelope)


def dispatch(
    tokens: Sequence[int], slots: Slots, score: FScore, *, threshold: int, window: int
) -> list[tuple[int, int]]:
    """Fill the free slots, or as many as there are requests.

    Args:
        tokens: prompt tokens of the waiting requests, in order of arrival.
        threshold: free slots in all up to which sets of requests are compared.
        window: requests, longest waiting first, whose sets are compared.

    Returns:
        (request, worker), in the order of placing.
    """
    given = _fill(tokens, slots, score, threshold)
    taken = {request for request, _ in given}
    waiting = [request for request in range(len(tokens)) if request not in taken]
    while waiting and slots.free.any():
        worker = slots.next()
        head = waiting[:window]
        chosen = _best_set([tokens[r] for r in head], int(slots.free[worker]), score, slots.margins(worker))
        requests = [head[position] for position in chosen]
        slots.admit(worker, [tokens[r] for r in requests])
        given += [(request, worker) for request in requests]
        waiting = [request for request in waiting if request not in requests]
    return given


def _fill(tokens: Sequence[int], slots: Slots, score: FScore, threshold: int) -> list[tuple[int, int]]:
    """Stage 1: while slots abound, the worker with the most takes the request with the largest F."""
    by_size = sorted(range(len(tokens)), key=tokens.__getitem__)
    sizes = [tokens[request] for request in by_size]
    given = []
    while by_size and slots.free.sum() > threshold:
        worker = slots.next()
        margins = slots.margins(worker)
        # F is concave, so that the best request is one of the two next to its peak.
        above = bisect_right(sizes, score.peak(margins))
        position = min(above, len(sizes) - 1)
        if 0 < above < len(sizes):
            position = above - 1 + int(score(sizes[above - 1 : above + 1], margins).argmax())
        slots.admit(worker, [sizes.pop(position)])
        given.append((by_size.pop(position), worker))
    return given


def _best_set(tokens: list[int], limit: int, score: FScore, margins: NDArray[np.float64]) -> list[int]:
    """Stage 2: the best set; where none gains anything, the best request, so that none starves."""
    sizes = np.array(tokens, np.float64)
    chosen, value = best_subset(sizes, limit, score, margins)
    return chosen if value > 0 else best_subset(sizes, 1, score, margins)[0]
