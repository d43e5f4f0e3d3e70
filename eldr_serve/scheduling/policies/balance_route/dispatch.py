"""BalanceRoute's two-stage assignment of waiting requests to free slots (paper, sections 3.2, 4.2)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from eldr_serve.scheduling.policies.balance_route.fscore import FScore, best_subset


class FreeSlots:
    """Free slots and projected loads of the available workers, one row each, during one dispatch.

    Args:
        free: int64[W], free slots; changed in place.
        loads: float64[W, H+1], KV tokens h steps ahead; changed in place.
    """

    def __init__(self, free: NDArray[np.int64], loads: NDArray[np.float64]) -> None:
        self.free = free
        self._loads = loads
        self._envelope = loads.max(axis=0)

    def choose_row(self) -> int:
        """Return the row of the worker with the most free slots; the largest minimum margin breaks ties."""
        most_free = np.flatnonzero(self.free == self.free.max())
        if len(most_free) == 1:
            return int(most_free[0])
        return int(most_free[(self._envelope - self._loads[most_free]).min(axis=1).argmax()])

    def margins(self, row: int) -> NDArray[np.float64]:
        """Return the KV tokens below the heaviest worker h steps ahead, float64[H+1]."""
        margins: NDArray[np.float64] = self._envelope - self._loads[row]
        return margins

    def admit(self, row: int, kv_tokens: NDArray[np.float64]) -> None:
        """Add requests to a worker.

        Args:
            kv_tokens: float64[n, H+1], their KV tokens h steps ahead.
        """
        self.free[row] -= len(kv_tokens)
        self._loads[row] += kv_tokens.sum(axis=0)
        np.maximum(self._envelope, self._loads[row], out=self._envelope)


class WaitingTokens:
    """The tokens of the waiting requests, in order of arrival.

    Args:
        tokens: float64[n], prompt tokens.
        steps: int64[n], expected decode steps; with H or more the request outlasts the horizon.
        horizon: H.
        end: whether F counts the tokens only until the expected end; else at every step, as in the paper.

    Attributes:
        counted_tokens: float64[n, H+1], prompt tokens while the request runs, the input of F.
        kv_tokens: float64[n, H+1], KV tokens h steps ahead.
    """

    def __init__(
        self, tokens: NDArray[np.float64], steps: NDArray[np.int64], horizon: int, *, end: bool = True
    ) -> None:
        ahead = np.arange(horizon + 1)
        running = ahead <= steps[:, None]
        self.counted_tokens: NDArray[np.float64] = tokens[:, None] * (running | (not end))
        self.kv_tokens: NDArray[np.float64] = (tokens[:, None] + ahead) * running


def dispatch(
    waiting_tokens: WaitingTokens,
    slots: FreeSlots,
    score: FScore,
    *,
    threshold: int,
    candidates: int,
    lookahead: int | None,
    overdue: int = 0,
) -> list[tuple[int, int]]:
    """Assign requests to free slots until there are no more requests or no more slots.

    Args:
        threshold: maximum total of free slots at which sets of requests are compared.
        candidates: number of longest-waiting requests whose sets are compared.
        lookahead: number of longest-waiting requests compared for a single slot. None, as in the paper: all
            in stage 1, and `candidates` in stage 2.
        overdue: number of leading requests that go before all others.

    Returns:
        (request, row of its worker), in the order of placing.
    """
    assigned: list[tuple[int, int]] = []
    order = list(range(len(waiting_tokens.counted_tokens)))
    for waiting in (order[:overdue], order[overdue:]):
        while waiting and slots.free.any():
            row = slots.choose_row()
            # Stage 1, many free slots: one request. Stage 2: the best set that fits the worker's slots.
            is_first_stage = slots.free.sum() > threshold
            limit = 1 if is_first_stage else int(slots.free[row])
            uses_lookahead = is_first_stage or (limit == 1 and lookahead is not None)
            head = waiting[: lookahead if uses_lookahead else candidates]
            chosen = _best_set(waiting_tokens.counted_tokens[head], limit, score, slots.margins(row))
            indices = [head[position] for position in chosen]
            slots.admit(row, waiting_tokens.kv_tokens[indices])
            assigned += [(request, row) for request in indices]
            for position in reversed(chosen):
                del waiting[position]
    return assigned


def _best_set(
    added: NDArray[np.float64], limit: int, score: FScore, margins: NDArray[np.float64]
) -> list[int]:
    """Return the positions of the best set, or of the best single request if no set has a gain."""
    chosen, value = best_subset(added, limit, score, margins)
    return chosen if value > 0 or limit == 1 else best_subset(added, 1, score, margins)[0]
