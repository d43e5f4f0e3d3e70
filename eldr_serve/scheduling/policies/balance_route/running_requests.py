"""The running requests of all workers, as columns of arrays."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_START_ROWS = 64
_NEVER = np.iinfo(np.int32).max  # value larger than any age


@dataclass(frozen=True)
class FinishedRequest:
    """A request that no longer runs, for the predictor.

    Attributes:
        is_complete: whether its answer has ended, so that `generated_tokens` is its length.
    """

    key: str | None
    prompt_tokens: int
    generated_tokens: int
    is_complete: bool = True


class RunningRequests:
    """The requests on all workers, one row each, with their expected remaining tokens.

    The remaining tokens r of a request, in [1, H], decrease from the value last set by one per generated
    token. A request that is expected to outlast the horizon keeps r = H, since decreasing it would predict
    an end within the horizon; with `count_down`, r decreases from H, as in the paper.

    Args:
        horizon: H, decode steps.
        count_down: whether r decreases from H.
    """

    def __init__(self, horizon: int, *, count_down: bool = False) -> None:
        self.horizon = horizon
        self._count_down = count_down
        self._row: dict[str, int] = {}
        self.ids: list[str] = []
        self.keys: list[str | None] = []
        self._columns = np.zeros((6, _START_ROWS), np.int64)

    def __len__(self) -> int:
        return len(self.ids)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._row

    # Columns: views, int64[n].
    @property
    def position(self) -> NDArray[np.int64]:
        """Return the positions of the workers."""
        return self._columns[0, : len(self)]

    @property
    def prompt_tokens(self) -> NDArray[np.int64]:
        return self._columns[1, : len(self)]

    @property
    def age(self) -> NDArray[np.int64]:
        """Return the number of generated tokens."""
        return self._columns[2, : len(self)]

    @property
    def _max_age(self) -> NDArray[np.int64]:
        """Return the age at which the request must end, its limit of new tokens."""
        return self._columns[3, : len(self)]

    @property
    def _predicted_at(self) -> NDArray[np.int64]:
        """Return the age at which r was last set; -1 if never."""
        return self._columns[4, : len(self)]

    @property
    def _expected_end(self) -> NDArray[np.int64]:
        """Return the expected age at the end, from the last prediction."""
        return self._columns[5, : len(self)]

    def add(
        self,
        request_id: str,
        position: int,
        prompt_tokens: int,
        *,
        max_new_tokens: int,
        key: str | None,
        age: int = 0,
    ) -> None:
        """Add a request to the worker at `position` with r = H; remove it from its previous worker."""
        self.remove(request_id)
        row = len(self.ids)
        if row == self._columns.shape[1]:
            self._columns = np.concatenate([self._columns, np.zeros_like(self._columns)], axis=1)
        last = max_new_tokens if max_new_tokens > 0 else _NEVER
        self._columns[:, row] = (position, prompt_tokens, age, last, -1, _NEVER)
        self._row[request_id] = row
        self.ids.append(request_id)
        self.keys.append(key)

    def remove(self, request_id: str) -> FinishedRequest | None:
        """Remove and return the request; return None if it is unknown."""
        row = self._row.pop(request_id, None)
        if row is None:
            return None
        finished = FinishedRequest(self.keys[row], int(self.prompt_tokens[row]), int(self.age[row]))
        last = len(self.ids) - 1
        self._columns[:, row] = self._columns[:, last]
        request, key = self.ids.pop(), self.keys.pop()
        if row != last:
            self.ids[row], self.keys[row], self._row[request] = request, key, row
        return finished

    def set_generated_tokens(self, generated_tokens: Mapping[str, int]) -> None:
        """Set totals of generated tokens by request id; ignore unknown requests."""
        rows = [(self._row[r], tokens) for r, tokens in generated_tokens.items() if r in self._row]
        if rows:
            changed = np.array(rows, np.int64)
            self.age[changed[:, 0]] = changed[:, 1]

    def stale_rows(self, refresh: int) -> NDArray[np.int64]:
        """Return rows whose r was never set, was set `refresh` tokens ago, or has run out (section C.2.3)."""
        predicted_at, age = self._predicted_at, self.age
        return np.flatnonzero(
            (predicted_at < 0) | (age - predicted_at >= refresh) | (age >= self._expected_end)
        )

    def set_remaining(self, rows: NDArray[np.int64], remaining: NDArray[np.float64]) -> None:
        """Set r of these rows, clipped to [1, H] and to the requests' remaining token limits."""
        age = self.age[rows]
        tokens = np.clip(np.rint(remaining), 1, self.horizon)
        if not self._count_down:
            tokens[tokens == self.horizon] = _NEVER
        tokens = np.minimum(tokens, self._max_age[rows] - age)
        self._predicted_at[rows] = age
        self._expected_end[rows] = age + np.maximum(tokens, 1).astype(np.int64)

    @property
    def remaining(self) -> NDArray[np.int64]:
        """Return the expected remaining tokens r, int64[n] in [1, H]."""
        return np.clip(self._expected_end - self.age, 1, self.horizon)

    def project(self, num_workers: int) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
        """Return the KV tokens of each worker h steps ahead, and its current number of requests.

        A request contributes prompt + generated + h at h = 0 .. r, then nothing.

        Returns:
            (float64[W, H+1], int64[W]); workers from `num_workers` on are left out.
        """
        steps = self.horizon + 1
        # Histogram over (position, r); cumulative sums from the far end count the requests that remain at h.
        cell = self.position * steps + self.remaining
        inside = self.position < num_workers
        cell, kv = cell[inside], (self.prompt_tokens + self.age)[inside]
        shape = (num_workers, steps)
        tokens = np.bincount(cell, kv, minlength=num_workers * steps).reshape(shape)
        requests = np.bincount(cell, minlength=num_workers * steps).reshape(shape)
        alive = requests[:, ::-1].cumsum(axis=1)[:, ::-1]
        loads = tokens[:, ::-1].cumsum(axis=1)[:, ::-1] + np.arange(float(steps)) * alive
        return loads, alive[:, 0]
