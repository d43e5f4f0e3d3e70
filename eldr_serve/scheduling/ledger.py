"""Present loads of workers, counted from placements and releases; workers are not polled."""

from __future__ import annotations

from collections.abc import Hashable, Iterable

import numpy as np
from numpy.typing import NDArray

from eldr_serve.scheduling.types import Loads


class LoadLedger:
    """Requests in flight, KV tokens (prompt + generated) and pending prefill tokens of each worker.

    A worker is any hashable name. Loads are never negative, and zero for an idle or unknown worker.
    """

    def __init__(self) -> None:
        self._requests: dict[str, tuple[int, int, int]] = {}  # id -> worker's row, prompt, generated
        self._rows: dict[Hashable, int] = {}  # row of every worker that was ever named
        self._pending_prefill: dict[str, int] = {}  # id -> prompt tokens still to be computed
        self._in_flight = np.zeros(16, np.int64)
        self._kv_tokens = np.zeros(16, np.int64)
        self._prefill_tokens = np.zeros(16, np.int64)

    def __len__(self) -> int:
        return len(self._requests)

    def add(self, request_id: str, worker: Hashable, prompt_tokens: int) -> None:
        """Add a request to `worker`; remove it from its previous worker."""
        self.release(request_id)
        row = self._row_of(worker)
        self._requests[request_id] = (row, prompt_tokens, 0)
        self._in_flight[row] += 1
        self._kv_tokens[row] += prompt_tokens

    def prefills(self, request_id: str, tokens: int) -> None:
        """Add pending prefill tokens of a request; its first generated token removes them."""
        held = self._requests.get(request_id)
        if held is not None:
            self._prefilled(request_id)
            self._pending_prefill[request_id] = tokens
            self._prefill_tokens[held[0]] += tokens

    def _prefilled(self, request_id: str) -> None:
        tokens = self._pending_prefill.pop(request_id, None)
        if tokens is not None:
            self._prefill_tokens[self._requests[request_id][0]] -= tokens

    def progress(self, request_id: str, generated_tokens: int) -> None:
        """Set the total of generated tokens; ignore unknown requests and decreases."""
        held = self._requests.get(request_id)
        if held is None or generated_tokens <= held[2]:
            return
        self._prefilled(request_id)
        row, prompt_tokens, before = held
        self._requests[request_id] = (row, prompt_tokens, generated_tokens)
        self._kv_tokens[row] += generated_tokens - before

    def release(self, request_id: str) -> None:
        """Remove a request; a second release does nothing."""
        self._prefilled(request_id)
        held = self._requests.pop(request_id, None)
        if held is None:
            return
        row, prompt_tokens, generated = held
        self._in_flight[row] -= 1
        self._kv_tokens[row] -= prompt_tokens + generated
        assert self._in_flight[row] >= 0
        assert self._kv_tokens[row] >= 0

    def rows(self, workers: Iterable[Hashable]) -> NDArray[np.int64]:
        """Return the permanent row numbers of these workers, int64[W], for `loads`."""
        return np.array([self._row_of(worker) for worker in workers], np.int64)

    def loads(self, rows: NDArray[np.int64], available: NDArray[np.bool_] | None = None) -> Loads:
        """Return a copy of the loads of the workers in these rows; None: all are available."""
        if available is None:
            available = np.ones(len(rows), bool)
        return Loads(self._in_flight[rows], self._kv_tokens[rows], available, self._prefill_tokens[rows])

    def _row_of(self, worker: Hashable) -> int:
        row = self._rows.setdefault(worker, len(self._rows))
        if row == len(self._in_flight):
            for column in ("_in_flight", "_kv_tokens", "_prefill_tokens"):
                values = getattr(self, column)
                setattr(self, column, np.append(values, np.zeros_like(values)))
        return row
