"""Current loads of workers, counted from placements and releases; workers are not polled."""

from __future__ import annotations

from collections.abc import Hashable, Iterable

import numpy as np
from numpy.typing import NDArray

from eldr_serve.scheduling.types import Loads


class LoadLedger:
    """Requests in flight, KV tokens (prompt + generated) and pending prefill tokens of each worker.

    A worker is any hashable name. Loads are never negative, and zero for an idle or unknown worker. A worker
    has a row while it has requests or if the last call of `name_workers` named it.

    Args:
        tokens_by_step: whether the caller adds generated tokens with `add_tokens`, since a simulator knows
            them after each step. `set_generated_tokens` then only attributes them to requests.
    """

    def __init__(self, *, tokens_by_step: bool = False) -> None:
        self._tokens_by_step = tokens_by_step
        self._requests: dict[str, tuple[int, int, int]] = {}  # id -> worker's row, prompt, generated
        self._rows: dict[Hashable, int] = {}  # row of each worker
        self._workers: list[Hashable] = []  # worker of each row
        self._free_rows: list[int] = []  # rows without a worker
        self._named_workers: set[Hashable] = set()  # they keep their rows when they are idle
        self._pending_prefill: dict[str, int] = {}  # id -> prompt tokens still to be computed
        self._loads = np.zeros((3, 16), np.int64)
        self._in_flight, self._kv_tokens, self._prefill_tokens = self._loads

    def __len__(self) -> int:
        return len(self._requests)

    @property
    def num_rows(self) -> int:
        """Return the number of rows in memory."""
        return len(self._workers)

    def add(self, request_id: str, worker: Hashable, prompt_tokens: int) -> None:
        """Add a request to `worker`; remove it from its previous worker."""
        self.release(request_id)
        row = self._row_of(worker)
        self._requests[request_id] = (row, prompt_tokens, 0)
        self._in_flight[row] += 1
        self._kv_tokens[row] += prompt_tokens

    def add_prefill(self, request_id: str, tokens: int) -> None:
        """Add pending prefill tokens of a request; its first generated token removes them."""
        entry = self._requests.get(request_id)
        if entry is not None:
            self._remove_prefill(request_id)
            self._pending_prefill[request_id] = tokens
            self._prefill_tokens[entry[0]] += tokens

    def _remove_prefill(self, request_id: str) -> None:
        tokens = self._pending_prefill.pop(request_id, None)
        if tokens is not None:
            self._prefill_tokens[self._requests[request_id][0]] -= tokens

    def set_generated_tokens(self, request_id: str, generated_tokens: int) -> None:
        """Set the total of generated tokens; ignore unknown requests and decreases."""
        entry = self._requests.get(request_id)
        if entry is None or generated_tokens <= entry[2]:
            return
        self._remove_prefill(request_id)
        row, prompt_tokens, before = entry
        self._requests[request_id] = (row, prompt_tokens, generated_tokens)
        if not self._tokens_by_step:
            self._kv_tokens[row] += generated_tokens - before

    def add_tokens(self, worker: Hashable, tokens: int) -> None:
        """Add tokens that the requests of `worker` have generated in a step."""
        self._kv_tokens[self._row_of(worker)] += tokens

    def release(self, request_id: str) -> None:
        """Remove a request; a second release does nothing."""
        self._remove_prefill(request_id)
        entry = self._requests.pop(request_id, None)
        if entry is None:
            return
        row, prompt_tokens, generated = entry
        self._in_flight[row] -= 1
        self._kv_tokens[row] -= prompt_tokens + generated
        assert self._in_flight[row] >= 0
        assert self._kv_tokens[row] >= 0
        self._free_if_idle(self._workers[row])

    def name_workers(self, workers: Iterable[Hashable]) -> None:
        """Give each of these workers a row, and free the rows of idle workers that are not among them."""
        before, self._named_workers = self._named_workers, set(workers)
        for worker in before - self._named_workers:
            self._free_if_idle(worker)
        for worker in self._named_workers - before:
            self._row_of(worker)

    def rows_of(self, workers: Iterable[Hashable]) -> NDArray[np.int64]:
        """Return the rows of named workers for `loads`, int64[W]; `name_workers` may change them."""
        return np.array([self._rows[worker] for worker in workers], np.int64)

    def loads(self, rows: NDArray[np.int64], available: NDArray[np.bool_] | None = None) -> Loads:
        """Return a copy of the loads of the workers in these rows; without `available`, all are available."""
        if available is None:
            available = np.ones(len(rows), bool)
        return Loads(self._in_flight[rows], self._kv_tokens[rows], available, self._prefill_tokens[rows])

    def _row_of(self, worker: Hashable) -> int:
        """Return the row of a worker; give it one if it has none."""
        row = self._rows.get(worker)
        if row is not None:
            return row
        if self._free_rows:
            row = self._free_rows.pop()
            self._workers[row] = worker
        else:
            row = len(self._workers)
            self._workers.append(worker)
        if row == self._loads.shape[1]:
            self._loads = np.concatenate([self._loads, np.zeros_like(self._loads)], axis=1)
            self._in_flight, self._kv_tokens, self._prefill_tokens = self._loads
        self._rows[worker] = row
        return row

    def _free_if_idle(self, worker: Hashable) -> None:
        row = self._rows[worker]
        if worker not in self._named_workers and not self._in_flight[row]:
            del self._rows[worker]
            self._free_rows.append(row)
