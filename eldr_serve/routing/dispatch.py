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
    tokens: Sequence[int],
    slots: Slots,
    score: FScore,
    *,
    threshold: int,
    window: int,
    overdue: Sequence[int] = (),
) -> list[tuple[int, int]]:
    """Fill the free slots, or as many as there are requests.

    Args:
        tokens: prompt tokens of the waiting requests, in order of arrival.
        threshold: free slots in all up to which sets of requests are compared.
        window: requests, longest waiting first, whose sets are compared.
        overdue: requests that go before all others.

    Returns:
        (request, worker), in the order of placing.
    """
    given = _place_sets(overdue, tokens, slots, score, window)
    others = sorted(set(range(len(tokens))).difference(overdue))
    filled = _fill(others, tokens, slots, score, threshold)
    rest = sorted(set(others).difference(request for request, _ in filled))
    return given + filled + _place_sets(rest, tokens, slots, score, window)


def _fill(
    requests: Sequence[int], tokens: Sequence[int], slots: Slots, score: FScore, threshold: int
) -> list[tuple[int, int]]:
    """Stage 1: while slots abound, the worker with the most takes the request with the largest F."""
    by_size = sorted(requests, key=tokens.__getitem__)
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


def _place_sets(
    requests: Sequence[int], tokens: Sequence[int], slots: Slots, score: FScore, window: int
) -> list[tuple[int, int]]:
    """Stage 2: worker by worker, the best set of the first requests."""
    waiting, given = list(requests), []
    while waiting and slots.free.any():
        worker = slots.next()
        head = waiting[:window]
        chosen = _best_set([tokens[r] for r in head], int(slots.free[worker]), score, slots.margins(worker))
        slots.admit(worker, [tokens[head[position]] for position in chosen])
        given += [(head[position], worker) for position in chosen]
        for position in reversed(chosen):
            del waiting[position]
    return given


def _best_set(tokens: list[int], limit: int, score: FScore, margins: NDArray[np.float64]) -> list[int]:
    """Positions of the best set; where none gains anything, of the best request, so that none starves."""
    sizes = np.array(tokens, np.float64)
    chosen, value = best_subset(sizes, limit, score, margins)
    return chosen if value > 0 else best_subset(sizes, 1, score, margins)[0]
